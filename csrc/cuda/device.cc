#include "cuda/device.h"

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "cuda/kernel_image.h"

namespace ringdl::cuda {

Device::Device(const Functions& functions, int number, const void* image)
    : functions_(functions), number_(number), image_(image) {
  RINGDL_CUDA(functions_, DeviceGet, &handle_, number);
  RINGDL_CUDA(functions_, DevicePrimaryCtxRetain, &context_, handle_);
  const Current current(*this);
  RINGDL_CUDA(functions_, StreamCreateWithPriority, &own_, kStreamNonBlocking, 0);
}

// Streams, events and the module go with the context, and that when nobody else uses it either.
Device::~Device() { functions_.DevicePrimaryCtxRelease(handle_); }

Device& Device::of(int number) {
  const Driver& found = driver();
  if (found.functions == nullptr) throw UsageError(found.why_not);
  static std::mutex mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>();  // to the very end
  const std::lock_guard lock(mutex);
  std::unique_ptr<Device>& device = (*devices)[number];
  if (!device) {
    int count = 0;
    RINGDL_CUDA(*found.functions, DeviceGetCount, &count);
    if (number < 0 || number >= count) {
      throw UsageError("there is no CUDA device " + std::to_string(number) + "; this process has " +
                       std::to_string(count));
    }
    device = std::make_unique<Device>(*found.functions, number, kernel_image());
  }
  return *device;
}

int Device::number_of(const void* memory) {
  const Driver& found = driver();
  if (found.functions == nullptr) throw UsageError(found.why_not);
  if (memory == nullptr) return 0;
  PointerAttribute wanted[] = {PointerAttribute::kMemoryType, PointerAttribute::kDeviceNumber};
  int type = 0;
  int number = 0;
  void* values[] = {&type, &number};
  const Result result =
      found.functions->PointerGetAttributes(2, wanted, values, address_of(memory));
  if (result != kSuccess || type != static_cast<int>(MemoryType::kDevice)) {
    throw UsageError("the array does not lie in the memory of a CUDA device");
  }
  return number;
}

Device::Current::Current(const Device& device) : functions_(device.functions_) {
  RINGDL_CUDA(functions_, CtxPushCurrent, device.context_);
  functions_.ThreadExchangeStreamCaptureMode(&mode_);
}

Device::Current::~Current() {
  functions_.ThreadExchangeStreamCaptureMode(&mode_);
  Context context = nullptr;
  functions_.CtxPopCurrent(&context);
}

class Device::EventMark final : public Mark {
 public:
  EventMark(Device& device, Event event) : device_(device), event_(event) {}
  ~EventMark() override {
    const std::lock_guard lock(device_.mutex_);
    device_.events_.push_back(event_);
  }
  bool is_passed() override {
    const Current current(device_);
    const Result result = device_.functions_.EventQuery(event_);
    if (result == kNotReady) return false;
    check(device_.functions_, result, "cuEventQuery");
    return true;
  }

 private:
  Device& device_;
  const Event event_;
};

// The default stream, null or 1, is never captured; that of a thread, 2, may be.
std::unique_ptr<Mark> Device::mark(Stream stream) {
  const Current current(*this);
  CaptureStatus status = CaptureStatus::kNone;
  if (reinterpret_cast<uintptr_t>(stream) > 1) functions_.StreamIsCapturing(stream, &status);
  if (status != CaptureStatus::kNone) {
    throw UsageError(
        "the stream is being captured into a CUDA graph, which cannot hold what ranks do together; "
        "capture computation alone, and call ringdl between graphs");
  }
  Event event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    }
  }
  if (event == nullptr) RINGDL_CUDA(functions_, EventCreate, &event, kEventDisableTiming);
  auto made = std::make_unique<EventMark>(*this, event);
  RINGDL_CUDA(functions_, EventRecord, event, stream);
  return made;
}

bool Device::reaches(int other) const {
  if (other == number_) return true;
  const Device& peer = of(other);
  const Current current(*this);
  const Result result = functions_.CtxEnablePeerAccess(peer.context_, 0);
  return result == kSuccess || result == kPeerAccessAlreadyEnabled;
}

std::shared_ptr<std::byte> Device::allocate(size_t bytes) {
  const Current current(*this);
  Address address = 0;
  const Result result = functions_.MemAlloc(&address, bytes == 0 ? 1 : bytes);
  if (result == kOutOfMemory) {
    size_t free = 0;
    size_t total = 0;
    functions_.MemGetInfo(&free, &total);
    throw OutOfMemory("CUDA device " + std::to_string(number_) + " has no room for " +
                      std::to_string(bytes) + " bytes: " + std::to_string(free) + " of " +
                      std::to_string(total) + " are free");
  }
  check(functions_, result, "cuMemAlloc");
  return {reinterpret_cast<std::byte*>(address), [this](std::byte* memory) {
            try {
              const Current now(*this);
              functions_.MemFree(address_of(memory));  // waits for what uses it
            } catch (const Error&) {  // the device is lost, or this is a forked child
            }
          }};
}

std::shared_ptr<uint64_t> Device::counter() const {
  const Current current(*this);
  void* memory = nullptr;
  RINGDL_CUDA(functions_, MemHostAlloc, &memory, sizeof(uint64_t), kHostAllocPortable);
  return {new (memory) uint64_t(0), [this](uint64_t* counter) {
            try {
              const Current now(*this);
              functions_.MemFreeHost(counter);
            } catch (const Error&) {  // as above
            }
          }};
}

void Device::copy(void* into, const void* from, size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  const Current current(*this);
  RINGDL_CUDA(functions_, MemcpyAsync, address_of(into), address_of(from), bytes, stream);
  RINGDL_CUDA(functions_, StreamSynchronize, stream);
}

void Device::zero(void* memory, size_t bytes) const {
  if (bytes == 0) return;
  const Current current(*this);
  RINGDL_CUDA(functions_, MemsetD8Async, address_of(memory), 0, bytes, own_);
  RINGDL_CUDA(functions_, StreamSynchronize, own_);
}

void Device::synchronize() const {
  const Current current(*this);
  RINGDL_CUDA(functions_, CtxSynchronize);
}

void Device::load_own_kernels() {
  if (module_ != nullptr || !why_no_kernels_.empty()) return;
  if (image_ == nullptr) {
    why_no_kernels_ = "this build of ringdl has no kernels for CUDA devices";
    return;
  }
  const Current current(*this);
  const Result result = functions_.ModuleLoadData(&module_, image_);
  if (result == kSuccess) return;
  module_ = nullptr;
  const char* text = nullptr;
  functions_.GetErrorString(result, &text);
  why_no_kernels_ = "the kernels of this build of ringdl cannot be used on CUDA device " +
                    std::to_string(number_) + " (" + (text != nullptr ? text : "unknown error") +
                    ")";
}

std::string Device::load_kernels() {
  const std::lock_guard lock(mutex_);
  load_own_kernels();
  return module_ != nullptr ? "" : why_no_kernels_;
}

void Device::use_kernels(const std::string& image) {
  const std::lock_guard lock(mutex_);
  const Current current(*this);
  RINGDL_CUDA(functions_, ModuleLoadData, &module_, image.data());
  kernels_.clear();
}

Function Device::kernel(const std::string& name) {
  const std::lock_guard lock(mutex_);
  Function& function = kernels_[name];
  if (function != nullptr) return function;
  load_own_kernels();
  if (module_ == nullptr) throw Error(why_no_kernels_);
  const Current current(*this);
  RINGDL_CUDA(functions_, ModuleGetFunction, &function, module_, name.c_str());
  return function;
}

void Device::use_custom(CustomKernel on_cpu, const std::string& image, const std::string& name) {
  const std::lock_guard lock(mutex_);
  Function& function = customs_[on_cpu];
  if (function != nullptr) return;
  const Current current(*this);
  Module module = nullptr;
  RINGDL_CUDA(functions_, ModuleLoadData, &module, image.data());
  RINGDL_CUDA(functions_, ModuleGetFunction, &function, module, name.c_str());
}

Function Device::custom(CustomKernel on_cpu) {
  const std::lock_guard lock(mutex_);
  const auto found = customs_.find(on_cpu);
  return found == customs_.end() ? nullptr : found->second;
}

}  // namespace ringdl::cuda

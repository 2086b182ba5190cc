// A CUDA driver for machines without one: the functions of libcuda.so.1 that ringdl uses, over the
// host's memory. What is queued in streams is carried out later, by a thread that takes the streams
// in an order drawn from a seed; so what does not wait for an event sees other bytes, and the
// thread sanitizer finds it. Kernels are run by the CPU, from the source that devices run. Memory
// of a device is a memfd, so that other processes can open it.
//
// RINGDL_PRETENDED_DEVICES is how many devices there are (1), RINGDL_PRETENDED_SEED the seed.

#include "cuda/pretended_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels.h"
#include "reduce/reduction.h"

#define RINGDL_HD
#include "cuda/kernels.inc"

namespace ringdl::cuda {

struct EventTag {
  uint64_t recorded = 0;
  uint64_t done = 0;
};
struct StreamTag {
  std::deque<std::function<bool()>> queue;  // each says whether it was carried out
  bool is_captured = false;
  bool is_destroyed = false;  // forgotten once what is queued was carried out
};
struct ContextTag {
  int device = 0;
  StreamTag stream;  // the default one
};
using Custom = void (*)(void* into, const void* from, int64_t count);
struct ModuleTag {
  Custom custom = nullptr;
};
struct FunctionTag {
  std::string name;
  size_t argument_bytes;
  void (*run)(const void* arguments, uint64_t threads);
  Custom custom = nullptr;  // instead: a user's reduction, which the CPU runs
};

namespace {

constexpr Result kInvalidContext = 201;
constexpr Result kNotFound = 500;
constexpr size_t kDeviceBytes = size_t{512} << 20;

struct Allocation {
  size_t bytes;
  MemoryType type;
  int device;
  int file = -1;
  bool is_opened = false;  // of another process
};

struct OpenHandle {
  pid_t process;
  int file;
  size_t bytes;
  int device;
};
static_assert(sizeof(OpenHandle) <= sizeof(MemoryHandle));

int setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

struct Machine {
  std::mutex lock;
  int devices = setting("RINGDL_PRETENDED_DEVICES", 1);
  std::vector<std::unique_ptr<ContextTag>> contexts;
  std::vector<std::unique_ptr<StreamTag>> streams;
  std::vector<std::unique_ptr<EventTag>> events;
  std::map<Address, Allocation> memory;
  std::vector<size_t> used;
  std::mt19937 random{static_cast<uint32_t>(setting("RINGDL_PRETENDED_SEED", 1))};
  Result sticky = kSuccess;
  std::map<std::string, Result> fails_next;
  uint64_t launches = 0;

  Machine() : used(static_cast<size_t>(devices), 0) {
    for (int i = 0; i < devices; ++i) {
      contexts.push_back(std::make_unique<ContextTag>());
      contexts.back()->device = i;
    }
  }

  bool is_idle() const {
    const auto is_empty = [](const auto& each) { return each->queue.empty(); };
    return std::ranges::all_of(streams, is_empty) &&
           std::ranges::all_of(contexts, [](auto& each) { return each->stream.queue.empty(); });
  }

  // One operation of some stream, if one can be carried out.
  bool carry_out_one() {
    std::unique_lock guard(lock);
    std::erase_if(streams, [](auto& each) { return each->is_destroyed && each->queue.empty(); });
    std::vector<StreamTag*> all;
    for (auto& each : contexts) all.push_back(&each->stream);
    for (auto& each : streams) all.push_back(each.get());
    std::erase_if(all, [](StreamTag* each) { return each->queue.empty(); });
    std::ranges::shuffle(all, random);
    for (StreamTag* const stream : all) {
      if (stream->queue.front()()) {
        stream->queue.pop_front();
        return true;
      }
    }
    return false;
  }

  const std::pair<const Address, Allocation>* find(Address address) const {
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return nullptr;
    const auto& found = *std::prev(after);
    return address < found.first + found.second.bytes ? &found : nullptr;
  }
};

// Never destroyed: its thread runs to the end of the process.
Machine& machine() {
  static Machine* const value = [] {
    auto* const made = new Machine();
    std::thread([made] {
      while (true) {
        if (!made->carry_out_one()) std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }).detach();
    return made;
  }();
  return *value;
}

thread_local std::vector<Context> current;

// The default stream has three names: null, that of all threads (1), and the thread's own (2).
bool is_default(Stream stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }

StreamTag& stream_of(Stream stream) {
  return is_default(stream) ? current.back()->stream : *stream;
}

Result fails(Machine& its, const char* call) {
  if (its.sticky != kSuccess) return its.sticky;
  const auto planned = its.fails_next.find(call);
  if (planned == its.fails_next.end()) return kSuccess;
  const Result result = planned->second;
  its.fails_next.erase(planned);
  return result;
}

void* bytes_at(Address address) { return reinterpret_cast<void*>(address); }

Result queue(const char* call, Stream stream, std::function<bool()> operation) {
  Machine& its = machine();
  const std::lock_guard guard(its.lock);
  if (const Result result = fails(its, call); result != kSuccess) return result;
  if (is_default(stream) && current.empty()) return kInvalidContext;
  stream_of(stream).queue.push_back(std::move(operation));
  return kSuccess;
}

template <class Arguments, void (*body)(const Arguments&, unsigned long long, unsigned long long)>
void run(const void* arguments, uint64_t threads) {
  const auto& its = *static_cast<const Arguments*>(arguments);
  for (uint64_t thread = 0; thread < threads; ++thread) body(its, thread, threads);
}

const FunctionTag* functions(const char* name) {
#define RINGDL_RUN(kernel, Arguments, body) \
  {#kernel, sizeof(Arguments), &run<Arguments, body>, nullptr},
  static const std::vector<FunctionTag> all = {RINGDL_KERNELS(RINGDL_RUN)};
  const auto found = std::ranges::find(all, name, &FunctionTag::name);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

void pretended_fail_next(const char* call, Result result) {
  const std::lock_guard guard(machine().lock);
  machine().fails_next[call] = result;
}

void pretended_break(Result result) {
  const std::lock_guard guard(machine().lock);
  machine().sticky = result;
}

size_t pretended_used(int device) {
  const std::lock_guard guard(machine().lock);
  return machine().used[static_cast<size_t>(device)];
}

}  // namespace ringdl::cuda

using namespace ringdl::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

/// A stream that is being captured, if it is said to be.
EXPORT Stream ringdl_pretended_stream(bool is_captured) {
  const std::lock_guard guard(machine().lock);
  machine().streams.push_back(std::make_unique<StreamTag>());
  machine().streams.back()->is_captured = is_captured;
  return machine().streams.back().get();
}

/// See pretended_break().
EXPORT void ringdl_pretended_break(Result result) { pretended_break(result); }

/// Queues an operation of another library's, which says whether it was carried out, else it is
/// asked again.
EXPORT Result ringdl_pretended_queue(Stream stream, bool (*operation)(void*), void* argument) {
  return queue("ringdl_pretended_queue", stream, [=] { return operation(argument); });
}

/// Nothing comes past what is in a stream now.
EXPORT Result ringdl_pretended_block(Stream stream) {
  return queue("ringdl_pretended_block", stream, [] { return false; });
}

/// How many kernels this process has launched.
EXPORT uint64_t ringdl_pretended_launches() {
  const std::lock_guard guard(machine().lock);
  return machine().launches;
}

/// In which order queued operations are carried out from now on.
EXPORT void ringdl_pretended_seed(unsigned seed) {
  const std::lock_guard guard(machine().lock);
  machine().random.seed(seed);
}

EXPORT Result cuInit(unsigned) { return machine().devices == 0 ? kNoDevice : kSuccess; }
EXPORT Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
EXPORT Result cuGetErrorName(Result, const char** name) {
  *name = "CUDA_ERROR";
  return kSuccess;
}
EXPORT Result cuGetErrorString(Result result, const char** text) {
  *text = result == kOutOfMemory    ? "out of memory"
          : result == kNoDevice     ? "no CUDA-capable device is detected"
          : result == kInvalidValue ? "invalid argument"
                                    : "unspecified launch failure";
  return kSuccess;
}

EXPORT Result cuDeviceGetCount(int* count) {
  *count = machine().devices;
  return kSuccess;
}
EXPORT Result cuDeviceGet(DeviceNumber* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < machine().devices ? kSuccess : 101;
}
EXPORT Result cuDeviceGetName(char* name, int length, DeviceNumber) {
  std::snprintf(name, static_cast<size_t>(length), "pretended device");
  return kSuccess;
}
EXPORT Result cuDeviceGetUuid_v2(Uuid* uuid, DeviceNumber device) {
  std::memset(uuid, 0, sizeof(Uuid));
  uuid->bytes[0] = static_cast<char>(device + 1);
  return kSuccess;
}
EXPORT Result cuDeviceGetPCIBusId(char* text, int length, DeviceNumber device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return kSuccess;
}
EXPORT Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, DeviceNumber) {
  switch (attribute) {
    case DeviceAttribute::kCapabilityMajor:
      *value = 9;
      break;
    case DeviceAttribute::kCapabilityMinor:
      *value = 0;
      break;
    case DeviceAttribute::kMultiprocessors:
      *value = 2;
      break;
    case DeviceAttribute::kUnifiedAddressing:
      *value = 1;
      break;
  }
  return kSuccess;
}
EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, DeviceNumber) {
  *bytes = kDeviceBytes;
  return kSuccess;
}
EXPORT Result cuDeviceCanAccessPeer(int* can, DeviceNumber, DeviceNumber) {
  *can = 1;
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRetain(Context* context, DeviceNumber device) {
  *context = machine().contexts[static_cast<size_t>(device)].get();
  return kSuccess;
}
EXPORT Result cuDevicePrimaryCtxRelease_v2(DeviceNumber) { return kSuccess; }
EXPORT Result cuCtxPushCurrent_v2(Context context) {
  current.push_back(context);
  return kSuccess;
}
EXPORT Result cuCtxPopCurrent_v2(Context* context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}
EXPORT Result cuCtxSynchronize() {
  if (current.empty()) return kInvalidContext;
  Machine& its = machine();
  std::unique_lock guard(its.lock);
  while (its.sticky == kSuccess && !its.is_idle()) {
    guard.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    guard.lock();
  }
  return its.sticky;
}
EXPORT Result cuCtxEnablePeerAccess(Context, unsigned) { return kSuccess; }

// An image "custom 123" stands for a kernel that does what the CPU's at the address 123 does.
EXPORT Result cuModuleLoadData(Module* module, const void* image) {
  if (image == nullptr) return kInvalidValue;
  const std::string text(static_cast<const char*>(image),
                         strnlen(static_cast<const char*>(image), 7));
  static std::list<ModuleTag> all;  // never unloaded
  const std::lock_guard guard(machine().lock);
  ModuleTag* const made = &all.emplace_back();
  if (text == "custom ") {
    const auto address = std::strtoull(static_cast<const char*>(image) + text.size(), nullptr, 10);
    made->custom = reinterpret_cast<Custom>(address);
  }
  *module = made;
  return kSuccess;
}
EXPORT Result cuModuleUnload(Module) { return kSuccess; }
EXPORT Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  if (module->custom != nullptr) {
    static std::list<FunctionTag> all;
    const std::lock_guard guard(machine().lock);
    *function = &all.emplace_back(FunctionTag{name, 0, nullptr, module->custom});
    return kSuccess;
  }
  *function = const_cast<FunctionTag*>(functions(name));
  return *function != nullptr ? kSuccess : kNotFound;
}
EXPORT Result cuLaunchKernel(Function function, unsigned grid_x, unsigned, unsigned,
                             unsigned block_x, unsigned, unsigned, unsigned, Stream stream,
                             void** parameters, void**) {
  {
    const std::lock_guard guard(machine().lock);
    ++machine().launches;
  }
  if (function->custom != nullptr) {
    auto* const into = *static_cast<void**>(parameters[0]);
    const auto* const from = *static_cast<const void**>(parameters[1]);
    const auto count = *static_cast<int64_t*>(parameters[2]);
    return queue("cuLaunchKernel", stream, [custom = function->custom, into, from, count] {
      custom(into, from, count);
      return true;
    });
  }
  const auto* const first = static_cast<const std::byte*>(parameters[0]);
  std::vector<std::byte> arguments(first, first + function->argument_bytes);
  const uint64_t threads = uint64_t{grid_x} * block_x;
  return queue("cuLaunchKernel", stream, [function, threads, arguments = std::move(arguments)] {
    function->run(arguments.data(), threads);
    return true;
  });
}

EXPORT Result cuMemAlloc_v2(Address* address, size_t bytes) {
  Machine& its = machine();
  const std::lock_guard guard(its.lock);
  if (const Result result = fails(its, "cuMemAlloc"); result != kSuccess) return result;
  if (current.empty()) return kInvalidContext;
  const int device = current.back()->device;
  size_t& used = its.used[static_cast<size_t>(device)];
  if (bytes == 0) return kInvalidValue;
  if (used + bytes > kDeviceBytes) return kOutOfMemory;
  const int file = memfd_create("pretended device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return kOutOfMemory;
  used += bytes;
  *address = reinterpret_cast<Address>(mapped);
  its.memory[*address] = {bytes, MemoryType::kDevice, device, file};
  return kSuccess;
}
EXPORT Result cuMemFree_v2(Address address) {  // waits for what is queued, as a real one does
  Machine& its = machine();
  std::unique_lock guard(its.lock);
  while (!its.is_idle()) {
    guard.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    guard.lock();
  }
  const auto found = its.memory.find(address);
  if (found == its.memory.end() || found->second.is_opened) return kInvalidValue;
  its.used[static_cast<size_t>(found->second.device)] -= found->second.bytes;
  munmap(bytes_at(address), found->second.bytes);
  close(found->second.file);
  its.memory.erase(found);
  return kSuccess;
}
EXPORT Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (current.empty()) return kInvalidContext;
  *total = kDeviceBytes;
  *free = kDeviceBytes - pretended_used(current.back()->device);
  return kSuccess;
}
EXPORT Result cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return kOutOfMemory;
  const std::lock_guard guard(machine().lock);
  machine().memory[reinterpret_cast<Address>(*memory)] = {bytes, MemoryType::kHost, 0};
  return kSuccess;
}
EXPORT Result cuMemFreeHost(void* memory) {
  {
    const std::lock_guard guard(machine().lock);
    if (machine().memory.erase(reinterpret_cast<Address>(memory)) == 0) return kInvalidValue;
  }
  std::free(memory);
  return kSuccess;
}
EXPORT Result cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  const std::lock_guard guard(machine().lock);
  const Allocation pinned{bytes, MemoryType::kHost, 0};
  const bool is_new = machine().memory.emplace(reinterpret_cast<Address>(memory), pinned).second;
  return is_new ? kSuccess : kHostMemoryAlreadyRegistered;
}
EXPORT Result cuMemHostUnregister(void* memory) {
  const std::lock_guard guard(machine().lock);
  const size_t erased = machine().memory.erase(reinterpret_cast<Address>(memory));
  return erased == 1 ? kSuccess : kInvalidValue;
}
EXPORT Result cuMemcpyAsync(Address into, Address from, size_t bytes, Stream stream) {
  return queue("cuMemcpyAsync", stream, [=] {
    std::memmove(bytes_at(into), bytes_at(from), bytes);
    return true;
  });
}
EXPORT Result cuMemsetD8Async(Address into, unsigned char value, size_t bytes, Stream stream) {
  return queue("cuMemsetD8Async", stream, [=] {
    std::memset(bytes_at(into), value, bytes);
    return true;
  });
}
EXPORT Result cuPointerGetAttributes(unsigned count, PointerAttribute* attributes, void** values,
                                     Address address) {
  Machine& its = machine();
  const std::lock_guard guard(its.lock);
  const auto* const found = its.find(address);
  for (unsigned i = 0; i < count; ++i) {
    int value = 0;
    if (found != nullptr && attributes[i] == PointerAttribute::kMemoryType) {
      value = static_cast<int>(found->second.type);
    } else if (found != nullptr && attributes[i] == PointerAttribute::kDeviceNumber) {
      value = found->second.device;
    }
    std::memcpy(values[i], &value, sizeof value);
  }
  return kSuccess;
}

EXPORT Result cuStreamCreateWithPriority(Stream* stream, unsigned, int) {
  if (current.empty()) return kInvalidContext;
  const std::lock_guard guard(machine().lock);
  machine().streams.push_back(std::make_unique<StreamTag>());
  *stream = machine().streams.back().get();
  return kSuccess;
}
EXPORT Result cuStreamDestroy_v2(Stream stream) {
  const std::lock_guard guard(machine().lock);
  stream->is_destroyed = true;
  return kSuccess;
}
EXPORT Result cuStreamSynchronize(Stream stream) {
  Machine& its = machine();
  std::unique_lock guard(its.lock);
  if (is_default(stream) && current.empty()) return kInvalidContext;
  while (its.sticky == kSuccess && !stream_of(stream).queue.empty()) {
    guard.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    guard.lock();
  }
  return its.sticky;
}
EXPORT Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  uint64_t awaited = 0;
  {
    const std::lock_guard guard(machine().lock);
    awaited = event->recorded;
  }
  return queue("cuStreamWaitEvent", stream, [=] { return event->done >= awaited; });
}
EXPORT Result cuStreamIsCapturing(Stream stream, CaptureStatus* status) {
  *status =
      !is_default(stream) && stream->is_captured ? CaptureStatus::kActive : CaptureStatus::kNone;
  return kSuccess;
}
EXPORT Result cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  thread_local CaptureMode its = CaptureMode::kGlobal;
  std::swap(its, *mode);
  return kSuccess;
}
EXPORT Result cuEventCreate(Event* event, unsigned) {
  const std::lock_guard guard(machine().lock);
  machine().events.push_back(std::make_unique<EventTag>());
  *event = machine().events.back().get();
  return kSuccess;
}
EXPORT Result cuEventDestroy_v2(Event) { return kSuccess; }  // streams may still wait for it
EXPORT Result cuEventRecord(Event event, Stream stream) {
  uint64_t number = 0;
  {
    const std::lock_guard guard(machine().lock);
    number = ++event->recorded;
  }
  return queue("cuEventRecord", stream, [=] {
    event->done = std::max(event->done, number);
    return true;
  });
}
EXPORT Result cuEventQuery(Event event) {
  const std::lock_guard guard(machine().lock);
  if (machine().sticky != kSuccess) return machine().sticky;
  return event->done >= event->recorded ? kSuccess : kNotReady;
}

EXPORT Result cuIpcGetMemHandle(MemoryHandle* handle, Address address) {
  const std::lock_guard guard(machine().lock);
  const auto found = machine().memory.find(address);
  if (found == machine().memory.end() || found->second.file < 0) return kInvalidValue;
  const OpenHandle open{getpid(), found->second.file, found->second.bytes, found->second.device};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &open, sizeof open);
  return kSuccess;
}
EXPORT Result cuIpcOpenMemHandle_v2(Address* address, MemoryHandle handle, unsigned) {
  OpenHandle its;
  std::memcpy(&its, &handle, sizeof its);
  if (its.process == getpid()) return kInvalidContext;
  const std::string path =
      "/proc/" + std::to_string(its.process) + "/fd/" + std::to_string(its.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidValue;
  void* const mapped = mmap(nullptr, its.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return kInvalidValue;
  *address = reinterpret_cast<Address>(mapped);
  const std::lock_guard guard(machine().lock);
  machine().memory[*address] = {its.bytes, MemoryType::kDevice, its.device, -1, true};
  return kSuccess;
}
EXPORT Result cuIpcCloseMemHandle(Address address) {
  const std::lock_guard guard(machine().lock);
  const auto found = machine().memory.find(address);
  if (found == machine().memory.end() || !found->second.is_opened) return kInvalidValue;
  munmap(bytes_at(address), found->second.bytes);
  machine().memory.erase(found);
  return kSuccess;
}

namespace ringdl::cuda {

const Functions& pretended_functions() {
  static const Functions all = [] {
    Functions its;
#define RINGDL_CUDA_FUNCTION(name, symbol) its.name = &symbol;
#include "cuda/driver_symbols.inc"
#undef RINGDL_CUDA_FUNCTION
    return its;
  }();
  return all;
}

}  // namespace ringdl::cuda

#include "cuda/nccl.h"

#include <dlfcn.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"

namespace ringdl::cuda {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr unsigned kPollsPerLook = 64;  // NCCL is asked for errors; in between the device alone
constexpr int kPatience = 1000;         // milliseconds, for others to end as well

std::mutex paths_mutex;
std::vector<std::string>& paths() {
  static std::vector<std::string> all;
  return all;
}

// Null where a function is missing.
const NcclFunctions* functions_of(void* library) {
  static NcclFunctions functions;
  bool is_complete = true;
#define RINGDL_NCCL_FUNCTION(name)                                                        \
  functions.name = std::bit_cast<decltype(functions.name)>(dlsym(library, "nccl" #name)); \
  is_complete = is_complete && functions.name != nullptr;
#include "cuda/nccl_symbols.inc"
#undef RINGDL_NCCL_FUNCTION
  return is_complete ? &functions : nullptr;
}

// A second copy beside one that is there would not know of what the first has to do.
Nccl find() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  std::vector<std::string> names;
  {
    const std::lock_guard lock(paths_mutex);
    names = paths();
  }
  names.emplace_back(kLibrary);
  Nccl found;
  for (size_t i = 0; library == nullptr && i < names.size(); ++i) {
    library = dlopen(names[i].c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) found.why_not = dlerror();
  }
  if (library == nullptr) return found;
  found.functions = functions_of(library);
  if (found.functions == nullptr) {
    found.why_not = std::string(kLibrary) + " is older than NCCL 2.14";
  } else {
    found.functions->GetVersion(&found.version);
  }
  return found;
}

// As the CPU's kernels do, see reduce.h: sums and products of bool are "or" and "and".
std::optional<NcclOperation> operation_of(DType dtype, Reduction reduction) {
  const bool is_bool = dtype == DType::kBool;
  switch (reduction) {
    case Reduction::kSum:
      return is_bool ? NcclOperation::kMax : NcclOperation::kSum;
    case Reduction::kProduct:
      return is_bool ? NcclOperation::kMin : NcclOperation::kProduct;
    case Reduction::kMax:
      return NcclOperation::kMax;
    case Reduction::kMin:
      return NcclOperation::kMin;
    case Reduction::kAverage:
      if (is_bool) return NcclOperation::kMin;
      if (is_floating(dtype)) return NcclOperation::kAverage;
      return {};
    default:
      return {};
  }
}

std::optional<NcclType> type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return NcclType::kFloat64;
    case DType::kFloat32:
      return NcclType::kFloat32;
    case DType::kFloat16:
      return NcclType::kFloat16;
    case DType::kBFloat16:
      return NcclType::kBFloat16;
    case DType::kInt64:
      return NcclType::kInt64;
    case DType::kInt32:
      return NcclType::kInt32;
    case DType::kInt8:
      return NcclType::kInt8;
    case DType::kUInt8:
    case DType::kBool:
      return NcclType::kUInt8;
    default:
      return {};
  }
}

}  // namespace

const Nccl& nccl() {
  static const Nccl found = find();
  return found;
}

void look_for_nccl_at(std::vector<std::string> where) {
  const std::lock_guard lock(paths_mutex);
  paths() = std::move(where);
}

bool reduces_by_nccl(DType dtype, Reduction reduction) {
  return type_of(dtype) && operation_of(dtype, reduction);
}

NcclGroup::NcclGroup(Device& device, int rank, int size)
    : device_(device), rank_(rank), size_(size), queue_(device) {}

NcclGroup::~NcclGroup() {
  if (communicator_ == nullptr) return;
  try {
    finalize();
  } catch (const Error&) {  // the device is lost, or this is a forked child
  }
}

// What is in flight is not waited for: nobody takes its result.
void NcclGroup::finalize() {
  const NcclFunctions& its = *nccl().functions;
  if (asked_ == nullptr && queue_.is_done(queue_.last())) {
    const Device::Current current(device_);
    ask(its.CommFinalize(communicator_), "ncclCommFinalize");
    for (int i = 0; i < kPatience && !is_ready(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (asked_ == nullptr) {
      its.CommDestroy(communicator_);
      return;
    }
  }
  abort();
}

DeviceLibrary::Member NcclGroup::member(int device) {
  Member own;
  Uuid uuid;
  DeviceNumber handle = 0;
  RINGDL_CUDA(device_.functions(), DeviceGet, &handle, device_.number());
  RINGDL_CUDA(device_.functions(), DeviceGetUuid, &uuid, handle);
  std::memcpy(own.device.data(), uuid.bytes, sizeof uuid.bytes);
  if (nccl().functions == nullptr) {
    own.state = Member::kMissing;
  } else if (is_aborted_) {
    own.state = Member::kAborted;
  } else if (device != device_.number()) {
    own.state = Member::kOtherDevice;
  }
  return own;
}

const DeviceLibrary::Id& NcclGroup::id() {
  if (!id_) {
    NcclId made;
    const Device::Current current(device_);
    ask(nccl().functions->GetUniqueId(&made), "ncclGetUniqueId");
    id_.emplace();
    std::memcpy(id_->data(), made.bytes, sizeof made.bytes);
  }
  return *id_;
}

std::optional<Executor::Ticket> NcclGroup::call(uint64_t number, const Id& id, const Array& array) {
  refuse_aborted();
  if (number != next_) return {};
  const NcclFunctions& its = *nccl().functions;
  const Device::Current current(device_);
  if (!is_ready()) return {};
  if (communicator_ == nullptr) {
    NcclId same;
    NcclConfig config;
    std::memcpy(same.bytes, id.data(), sizeof same.bytes);
    ask(its.CommInitRankConfig(&communicator_, size_, same, rank_, &config),
        "ncclCommInitRankConfig");
    if (!is_ready()) return {};
  }
  if (!is_called_ && array.count > 0) {
    ask(its.AllReduce(array.data, array.data, array.count, *type_of(array.dtype),
                      *operation_of(array.dtype, array.reduction), communicator_, queue_.stream()),
        "ncclAllReduce");
    is_called_ = true;
    if (!is_ready()) return {};
  }
  is_called_ = false;
  ++next_;
  return queue_.add();
}

bool NcclGroup::is_done(Executor::Ticket ticket) {
  refuse_aborted();
  if (queue_.is_done(ticket)) return true;
  if (++polls_ % kPollsPerLook == 0) {
    asked_ = "ncclAllReduce";
    is_ready();
  }
  return false;
}

void NcclGroup::abort() noexcept {
  if (std::exchange(is_aborted_, true) || communicator_ == nullptr) return;
  try {
    const Device::Current current(device_);
    nccl().functions->CommAbort(std::exchange(communicator_, nullptr));
  } catch (const Error&) {  // the device is lost, and with it what it did
  }
}

void NcclGroup::ask(NcclResult result, const char* call) {
  asked_ = call;
  if (result == kNcclInProgress) return;
  asked_ = nullptr;
  if (result == kNcclSuccess) return;
  throw DeviceError(std::string(call) + ": " + nccl().functions->GetErrorString(result) +
                    "; NCCL_DEBUG=WARN says more, and another algorithm goes on");
}

// Whether NCCL has done what it was asked for.
bool NcclGroup::is_ready() {
  if (asked_ == nullptr) return true;
  NcclResult state = kNcclSuccess;
  NcclResult result = nccl().functions->CommGetAsyncError(communicator_, &state);
  if (result == kNcclSuccess) result = state;
  ask(result, asked_);
  return asked_ == nullptr;
}

void NcclGroup::refuse_aborted() const {
  if (!is_aborted_) return;
  throw DeviceError(
      "NCCL was aborted, as another work of its ranks had failed; after shutdown() and init() it "
      "is "
      "made anew");
}

}  // namespace ringdl::cuda

#include "cuda/executor.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "cuda/kernels.h"

namespace ringdl::cuda {
namespace {

constexpr unsigned kThreadsPerBlock = 256;
constexpr size_t kMostBlocks = 1024;  // each thread then takes several items
constexpr size_t kVectorBytes = 16;

template <class T>
T* on_device(std::byte* memory) {
  return reinterpret_cast<T*>(memory);
}

std::string kernel_name(DType dtype, Reduction reduction) {
  if (dtype == DType::kBool) {  // see reduce.h
    switch (reduction) {
      case Reduction::kSum:
      case Reduction::kMax:
      case Reduction::kBitOr:
        return "ringdl_max_bool";
      case Reduction::kBitXor:
        return "ringdl_bitxor_bool";
      default:
        return "ringdl_min_bool";
    }
  }
  static constexpr const char* names[kReductionCount] = {"sum",     "average", "min",   "max",
                                                         "product", "bitand",  "bitor", "bitxor"};
  return std::string("ringdl_") + names[static_cast<int>(reduction)] + "_" +
         std::string(name_of(dtype));
}

void refuse_custom(CustomKernel kernel) {
  if (kernel == nullptr) return;
  throw UsageError(
      "a custom_op is compiled for the CPU; arrays on a device take none of these yet");
}

}  // namespace

size_t DeviceExecutor::most_arrays() const { return kMostArrays; }

Executor::Ticket DeviceExecutor::copy(std::byte* into, const std::byte* from, size_t bytes, bool) {
  if (bytes > 0) {
    const Device::Current current(device_);
    RINGDL_CUDA(device_.functions(), MemcpyAsync, address_of(into), address_of(from), bytes,
                queue_.stream());
  }
  return queue_.add();
}

Executor::Ticket DeviceExecutor::zero(std::byte* into, size_t bytes) {
  if (bytes > 0) {
    const Device::Current current(device_);
    RINGDL_CUDA(device_.functions(), MemsetD8Async, address_of(into), 0, bytes, queue_.stream());
  }
  return queue_.add();
}

Executor::Ticket DeviceExecutor::combine(const Reducer& reducer, std::byte* into,
                                         const std::byte* from, size_t bytes) {
  refuse_custom(reducer.custom());
  launch(reducer.dtype(), undivided(reducer.dtype(), reducer.reduction()), 1,
         std::initializer_list<const std::byte*>{into, from}, {&into, 1}, bytes);
  return queue_.add();
}

Executor::Ticket DeviceExecutor::finish(const Reducer& reducer, std::byte* into,
                                        const std::byte* from, size_t bytes) {
  refuse_custom(reducer.custom());
  launch(reducer.dtype(), reducer.reduction(), reducer.divisor(),
         std::initializer_list<const std::byte*>{into, from}, {&into, 1}, bytes);
  return queue_.add();
}

Executor::Ticket DeviceExecutor::reduce(const ReduceMany& reduce_many,
                                        std::span<const std::byte* const> sources,
                                        std::span<std::byte* const> targets, size_t bytes, bool) {
  refuse_custom(reduce_many.custom());
  launch(reduce_many.dtype(), reduce_many.reduction(), reduce_many.divisor(), sources, targets,
         bytes);
  return queue_.add();
}

Executor::Ticket DeviceExecutor::pack(const Codec& codec, std::byte* wire, const std::byte* array,
                                      size_t bytes) {
  ConvertArguments arguments{array, wire, bytes / sizeof(float)};
  launch("ringdl_narrow_" + std::string(name_of(*codec.wire())), &arguments, arguments.count);
  return queue_.add();
}

Executor::Ticket DeviceExecutor::unpack(const Codec& codec, std::byte* array, const std::byte* wire,
                                        size_t bytes) {
  ConvertArguments arguments{wire, array, bytes / sizeof(float)};
  launch("ringdl_widen_" + std::string(name_of(*codec.wire())), &arguments, arguments.count);
  return queue_.add();
}

void DeviceExecutor::launch(DType dtype, Reduction reduction, int64_t divisor,
                            std::span<const std::byte* const> sources,
                            std::span<std::byte* const> targets, size_t bytes) {
  if (sources.size() > kMostArrays || targets.size() > kMostArrays) {
    throw Error("a device reduces at most " + std::to_string(kMostArrays) + " arrays at once");
  }
  ReduceArguments arguments{};
  arguments.source_count = static_cast<int>(sources.size());
  arguments.target_count = static_cast<int>(targets.size());
  arguments.count = bytes / item_bytes(dtype);
  arguments.divisor = divisor;
  Address all = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    arguments.sources[i] = sources[i];
    all |= address_of(sources[i]);
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    arguments.targets[i] = targets[i];
    all |= address_of(targets[i]);
  }
  arguments.are_aligned = all % kVectorBytes == 0;
  launch(kernel_name(dtype, reduction), &arguments,
         arguments.are_aligned ? bytes / kVectorBytes + 1 : arguments.count);
}

void DeviceExecutor::launch(const std::string& kernel, void* arguments, size_t items) {
  if (items == 0) return;
  const Function function = device_.kernel(kernel);
  const Device::Current current(device_);
  const size_t blocks = std::min((items + kThreadsPerBlock - 1) / kThreadsPerBlock, kMostBlocks);
  RINGDL_CUDA(device_.functions(), LaunchKernel, function, static_cast<unsigned>(blocks), 1, 1,
              kThreadsPerBlock, 1, 1, 0, queue_.stream(), &arguments, nullptr);
}

}  // namespace ringdl::cuda

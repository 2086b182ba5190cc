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
  if (reducer.custom() != nullptr) {
    launch_custom(reducer.custom(), reducer.dtype(), into, from, bytes);
  } else {
    launch(reducer.dtype(), undivided(reducer.dtype(), reducer.reduction()), 1,
           std::initializer_list<const std::byte*>{into, from}, {&into, 1}, bytes);
  }
  return queue_.add();
}

Executor::Ticket DeviceExecutor::finish(const Reducer& reducer, std::byte* into,
                                        const std::byte* from, size_t bytes) {
  if (reducer.custom() != nullptr) return combine(reducer, into, from, bytes);
  launch(reducer.dtype(), reducer.reduction(), reducer.divisor(),
         std::initializer_list<const std::byte*>{into, from}, {&into, 1}, bytes);
  return queue_.add();
}

Executor::Ticket DeviceExecutor::reduce(const ReduceMany& reduce_many,
                                        std::span<const std::byte* const> sources,
                                        std::span<std::byte* const> targets, size_t bytes, bool) {
  if (reduce_many.custom() != nullptr) {
    reduce_custom(reduce_many, sources, targets, bytes);
  } else {
    launch(reduce_many.dtype(), reduce_many.reduction(), reduce_many.divisor(), sources, targets,
           bytes);
  }
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

// A user's reduction joins two arrays, so the result is formed in a target that no later source is:
// in the first source, where collectives reduce in place.
void DeviceExecutor::reduce_custom(const ReduceMany& reduce_many,
                                   std::span<const std::byte* const> sources,
                                   std::span<std::byte* const> targets, size_t bytes) {
  const auto place = std::ranges::find_if(targets, [&sources](const std::byte* target) {
    return std::ranges::find(sources.subspan(1), target) == sources.end();
  });
  if (place == targets.end()) throw Error("each array of a reduction is written and read later");
  copy(*place, sources[0], *place == sources[0] ? 0 : bytes, false);
  for (const std::byte* const source : sources.subspan(1)) {
    launch_custom(reduce_many.custom(), reduce_many.dtype(), *place, source, bytes);
  }
  for (std::byte* const target : targets) copy(target, *place, target == *place ? 0 : bytes, false);
}

void DeviceExecutor::launch_custom(CustomKernel kernel, DType dtype, std::byte* into,
                                   const std::byte* from, size_t bytes) {
  const Function function = device_.custom(kernel);
  if (function == nullptr) throw Error("the device lacks a custom_op");
  int64_t count = static_cast<int64_t>(bytes / item_bytes(dtype));
  void* parameters[] = {&into, &from, &count};
  launch(function, parameters, static_cast<size_t>(count));
}

void DeviceExecutor::launch(const std::string& kernel, void* arguments, size_t items) {
  if (items > 0) launch(device_.kernel(kernel), &arguments, items);
}

void DeviceExecutor::launch(Function function, void** parameters, size_t items) {
  if (items == 0) return;
  const Device::Current current(device_);
  const size_t blocks = std::min((items + kThreadsPerBlock - 1) / kThreadsPerBlock, kMostBlocks);
  RINGDL_CUDA(device_.functions(), LaunchKernel, function, static_cast<unsigned>(blocks), 1, 1,
              kThreadsPerBlock, 1, 1, 0, queue_.stream(), parameters, nullptr);
}

}  // namespace ringdl::cuda

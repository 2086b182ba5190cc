#include "cuda/pack.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "cuda/kernels.h"

namespace ringdl::cuda {
namespace {

constexpr size_t kMostBlocks = 4096;  // each takes several chunks

std::string kernel_name(const Packing& how) {
  const auto [from, to, scale, non_finite] = how;
  const bool is_same = from == to;
  if (is_same && scale == 1 && non_finite == nullptr && item_bytes(to) > 1) {
    return "ringdl_pack_" + std::to_string(item_bytes(to)) + "_bytes";
  }
  if (!can_pack(from, to)) {
    throw UsageError("a device does not pack " + std::string(name_of(from)) + " as " +
                     std::string(name_of(to)));
  }
  return "ringdl_pack_" + std::string(name_of(from)) + "_" + std::string(name_of(to));
}

void launch(Device& device, Stream stream, Function kernel, PackArguments& arguments) {
  const size_t blocks = std::min<size_t>(arguments.chunks, kMostBlocks);
  void* parameters = &arguments;
  const Device::Current current(device);
  RINGDL_CUDA(device.functions(), LaunchKernel, kernel, static_cast<unsigned>(blocks), 1, 1,
              static_cast<unsigned>(kPackThreads), 1, 1, 0, stream, &parameters, nullptr);
}

}  // namespace

void pack(Device& device, Stream stream, const Packing& how, std::span<const PackItem> items) {
  const Function kernel = device.kernel(kernel_name(how));
  PackArguments arguments{};
  arguments.scale = how.scale;
  arguments.non_finite = reinterpret_cast<unsigned long long*>(how.non_finite);
  for (const PackItem& item : items) {
    if (item.count == 0) continue;
    arguments.arrays[arguments.array_count++] = {item.from, item.to, item.count, arguments.chunks};
    arguments.chunks += (item.count + kPackChunk - 1) / kPackChunk;
    if (arguments.array_count < kMostPacked) continue;
    launch(device, stream, kernel, arguments);
    arguments.array_count = 0;
    arguments.chunks = 0;
  }
  if (arguments.array_count > 0) launch(device, stream, kernel, arguments);
}

}  // namespace ringdl::cuda

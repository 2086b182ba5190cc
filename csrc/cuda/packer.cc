#include "cuda/packer.h"

#include <algorithm>
#include <string>

#include "base/buffer.h"
#include "base/error.h"
#include "cuda/kernels.h"
#include "cuda/pinned.h"

namespace ringdl::cuda {
namespace {

constexpr size_t kMostBlocks = 4096;  // each takes several chunks

bool is_float32_or_narrower(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// float16 to bfloat16 is nothing that anybody needs.
std::string kernel_name(DType from, DType to, double scale) {
  const bool is_same = from == to;
  if (is_same && scale == 1 && item_bytes(to) > 1) {
    return "ringdl_pack_" + std::to_string(item_bytes(to)) + "_bytes";
  }
  const bool is_known = is_same ? is_float32_or_narrower(to) || to == DType::kFloat64
                                : is_float32_or_narrower(from) && is_float32_or_narrower(to) &&
                                      (from == DType::kFloat32 || to == DType::kFloat32);
  if (!is_known) {
    throw UsageError("a device does not pack " + std::string(name_of(from)) + " as " +
                     std::string(name_of(to)));
  }
  return "ringdl_pack_" + std::string(name_of(from)) + "_" + std::string(name_of(to));
}

}  // namespace

DevicePacker::DevicePacker(Device& device, size_t most_items)
    : device_(device),
      most_items_(most_items),
      pinned_(pin(device, most_items * sizeof(PackedArray),
                  [](size_t bytes) { return allocate(bytes); })),
      table_(device.allocate(most_items * sizeof(PackedArray))) {}

void DevicePacker::pack(void* stream, DType from, DType to, std::span<const Item> items,
                        double scale) {
  if (items.empty()) return;
  if (items.size() > most_items_ - used_) throw Error("more arrays to pack than were announced");
  const Function kernel = device_.kernel(kernel_name(from, to, scale));
  PackArguments arguments{};
  auto* const rows = reinterpret_cast<PackedArray*>(pinned_.get()) + used_;
  for (size_t i = 0; i < items.size(); ++i) {
    rows[i] = {items[i].from, items[i].to, items[i].count, arguments.chunks};
    arguments.chunks += (items[i].count + kPackChunk - 1) / kPackChunk;
  }
  std::byte* const table = table_.get() + used_ * sizeof(PackedArray);
  used_ += items.size();
  if (arguments.chunks == 0) return;
  arguments.arrays = reinterpret_cast<const PackedArray*>(table);
  arguments.array_count = static_cast<int>(items.size());
  arguments.scale = scale;
  const Device::Current current(device_);
  const auto in = static_cast<Stream>(stream);
  RINGDL_CUDA(device_.functions(), MemcpyAsync, address_of(table), address_of(rows),
              items.size() * sizeof(PackedArray), in);
  const size_t blocks = std::min<size_t>(arguments.chunks, kMostBlocks);
  void* parameters = &arguments;
  RINGDL_CUDA(device_.functions(), LaunchKernel, kernel, static_cast<unsigned>(blocks), 1, 1,
              static_cast<unsigned>(kPackThreads), 1, 1, 0, in, &parameters, nullptr);
}

}  // namespace ringdl::cuda

#include "bucket/storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringdl {
namespace {

// The bits of 1 in each floating dtype, in the order of DType.
template <class Bits>
void write(std::byte* at, Bits bits) {
  std::memcpy(at, &bits, sizeof(bits));
}

void write_one(std::byte* at, DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return write(at, 1.0);
    case DType::kFloat32:
      return write(at, 1.0f);
    case DType::kFloat16:
      return write<uint16_t>(at, 0x3c00);
    default:
      return write<uint16_t>(at, 0x3f80);
  }
}

}  // namespace

BucketStorage::BucketStorage(BucketPlan plan, const Allocate& allocate, bool flags_alone)
    : plan_(std::move(plan)), flags_alone_(flags_alone) {
  for (const BucketLayout& bucket : plan_.buckets) {
    const size_t bytes = bucket.bytes - (flags_alone ? bucket.flags_begin : 0);
    buckets_.push_back(allocate(bytes));
    std::memset(buckets_.back().get(), 0, bytes);
  }
}

std::byte* BucketStorage::gradient(int index) {
  const Placement& placement = plan_.placements[static_cast<size_t>(index)];
  return bucket(placement.bucket) + placement.begin;
}

std::byte* BucketStorage::flag(int index) const {
  const Placement& placement = plan_.placements[static_cast<size_t>(index)];
  const auto number = static_cast<size_t>(placement.bucket);
  const BucketLayout& layout = plan_.buckets[number];
  return buckets_[number].get() + flags_begin(layout) +
         static_cast<size_t>(placement.position) * item_bytes(layout.dtype);
}

void BucketStorage::set_produced(int index, bool produced) {
  const int number = plan_.placements[static_cast<size_t>(index)].bucket;
  const DType dtype = plan_.buckets[static_cast<size_t>(number)].dtype;
  if (produced) {
    write_one(flag(index), dtype);
  } else {
    std::memset(flag(index), 0, item_bytes(dtype));
  }
}

bool BucketStorage::is_produced(int index) const {
  const int number = plan_.placements[static_cast<size_t>(index)].bucket;
  const std::byte* const its = flag(index);
  return std::any_of(its, its + item_bytes(plan_.buckets[static_cast<size_t>(number)].dtype),
                     [](std::byte byte) { return byte != std::byte{0}; });
}

}  // namespace ringdl

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

BucketStorage::BucketStorage(BucketPlan plan, const Allocate& allocate) : plan_(std::move(plan)) {
  for (const BucketLayout& bucket : plan_.buckets) {
    buckets_.push_back(allocate(bucket.bytes));
    std::memset(buckets_.back().get(), 0, bucket.bytes);
  }
}

std::byte* BucketStorage::gradient(int index) {
  const Placement& placement = plan_.placements[static_cast<size_t>(index)];
  return bucket(placement.bucket) + placement.begin;
}

size_t BucketStorage::flag_begin(int index) const {
  const Placement& placement = plan_.placements[static_cast<size_t>(index)];
  const BucketLayout& layout = plan_.buckets[static_cast<size_t>(placement.bucket)];
  return layout.flags_begin + static_cast<size_t>(placement.position) * item_bytes(layout.dtype);
}

void BucketStorage::set_produced(int index, size_t bytes, bool produced) {
  const int number = plan_.placements[static_cast<size_t>(index)].bucket;
  const DType dtype = plan_.buckets[static_cast<size_t>(number)].dtype;
  std::byte* flag = bucket(number) + flag_begin(index);
  if (produced) {
    write_one(flag, dtype);
  } else {
    std::memset(flag, 0, item_bytes(dtype));
    std::memset(gradient(index), 0, bytes);
  }
}

bool BucketStorage::is_produced(int index) const {
  const Placement& placement = plan_.placements[static_cast<size_t>(index)];
  const auto number = static_cast<size_t>(placement.bucket);
  const std::byte* flag = buckets_[number].get() + flag_begin(index);
  return std::any_of(flag, flag + item_bytes(plan_.buckets[number].dtype),
                     [](std::byte byte) { return byte != std::byte{0}; });
}

}  // namespace ringdl

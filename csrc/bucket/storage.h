#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "bucket/plan.h"

namespace ringdl {

/// The memory of a plan's buckets: allocated once, zero at first, never moved.
///
/// Flags follow the gradients of a bucket, one element of its dtype per gradient: 1 if this rank
/// produced the gradient, else 0. They are reduced with the gradients, by sum or average, so that
/// afterwards a flag is positive if any rank produced its gradient. Where the gradients lie on a
/// device and are reduced there, the flags alone are here.
class BucketStorage {
 public:
  /// Allocates `bytes` bytes at a multiple of 64.
  using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;

  BucketStorage(BucketPlan plan, const Allocate& allocate, bool flags_alone = false);

  /// What there is of a bucket: all, or its flags.
  std::byte* bucket(int number) { return buckets_[static_cast<size_t>(number)].get(); }
  std::byte* gradient(int index);

  /// Notes what this rank contributes, in its flag alone.
  void set_produced(int index, bool produced);
  /// After the reduction: whether any rank produced it.
  bool is_produced(int index) const;

 private:
  std::byte* flag(int index) const;
  size_t flags_begin(const BucketLayout& layout) const {
    return flags_alone_ ? 0 : layout.flags_begin;
  }

  const BucketPlan plan_;
  const bool flags_alone_;
  std::vector<std::shared_ptr<std::byte>> buckets_;
};

}  // namespace ringdl

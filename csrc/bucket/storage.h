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
/// afterwards a flag is positive if any rank produced its gradient.
class BucketStorage {
 public:
  /// Allocates `bytes` bytes at a multiple of 64.
  using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;

  BucketStorage(BucketPlan plan, const Allocate& allocate);

  std::byte* bucket(int number) { return buckets_[static_cast<size_t>(number)].get(); }
  std::byte* gradient(int index);

  /// Notes what this rank contributes; a gradient that is not produced is set to zero.
  void set_produced(int index, size_t bytes, bool produced);
  /// After the reduction: whether any rank produced it.
  bool is_produced(int index) const;

 private:
  size_t flag_begin(int index) const;

  const BucketPlan plan_;
  std::vector<std::shared_ptr<std::byte>> buckets_;
};

}  // namespace ringdl

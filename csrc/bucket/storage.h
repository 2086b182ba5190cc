#pragma once

#include <vector>

#include "base/buffer.h"
#include "bucket/plan.h"

namespace ringdl {

/// The memory of a plan's buckets: allocated once, zero at first, never moved.
///
/// Behind the gradients of a bucket stand flags, one element of its dtype each: 1 if this rank
/// produced the gradient, else 0. They are reduced with the gradients, by sum or average, so that
/// afterwards a flag is positive if any rank produced its gradient.
class BucketStorage {
 public:
  explicit BucketStorage(BucketPlan plan);

  std::byte* bucket(int number) { return buffers_[static_cast<size_t>(number)].data(); }
  std::byte* gradient(int index);

  /// Notes what this rank contributes; a gradient that is not produced is set to zero.
  void set_produced(int index, size_t bytes, bool produced);
  /// After the reduction: whether any rank produced it.
  bool is_produced(int index) const;

 private:
  size_t flag_begin(int index) const;

  const BucketPlan plan_;
  std::vector<Buffer> buffers_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace ringdl {

/// One gradient: what the framework knows of its parameter.
struct GradientSpec {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
  /// In elements, dense (a permutation of row-major). Empty: row-major.
  std::vector<int64_t> strides;

  int64_t count() const;
  size_t bytes() const { return static_cast<size_t>(count()) * item_bytes(dtype); }
};

/// One flat array: gradients, each at a multiple of 64 bytes, then one flag element per gradient.
struct BucketLayout {
  DType dtype = DType::kFloat32;
  std::vector<int> gradients;  // in the order in which they become ready
  size_t flags_begin = 0;
  size_t bytes = 0;  // with the flags
};

struct Placement {
  int bucket = 0;
  int position = 0;  // in the bucket's `gradients`
  size_t begin = 0;  // bytes from the bucket's start
};

struct BucketPlan {
  std::vector<BucketLayout> buckets;  // in the order in which they become complete
  std::vector<Placement> placements;  // by gradient
};

/// Groups gradients into buckets. Pure: the same on all ranks that pass the same.
///
/// Gradients become ready in about the reverse order of registration, so that is the order in which
/// they are placed, each in the open bucket of its dtype. A bucket is closed once it holds
/// `bucket_bytes`, the first of each dtype once it holds `first_bucket_bytes`: a small one, so that
/// communication starts early in the backward pass.
/// @throws UsageError  not floating, negative extents, strides that are not dense, duplicate names,
///                     or a bucket size that is not positive
BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, int64_t bucket_bytes,
                        int64_t first_bucket_bytes);

}  // namespace ringdl

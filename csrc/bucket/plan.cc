#include "bucket/plan.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"

namespace ringdl {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Dense: sorted by stride, each stride is the product of the extents before it.
bool is_dense(const GradientSpec& gradient) {
  if (gradient.strides.empty() || gradient.count() == 0) return true;
  if (gradient.strides.size() != gradient.shape.size()) return false;
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (size_t i = 0; i < gradient.shape.size(); ++i) {
    if (gradient.shape[i] > 1) dimensions.emplace_back(gradient.strides[i], gradient.shape[i]);
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (const auto& [stride, extent] : dimensions) {
    if (stride != expected) return false;
    expected *= extent;
  }
  return true;
}

void check(const std::vector<GradientSpec>& gradients, int64_t bucket_bytes,
           int64_t first_bucket_bytes) {
  if (bucket_bytes <= 0 || first_bucket_bytes <= 0) {
    throw UsageError("bucket_bytes and first_bucket_bytes must be positive, not " +
                     std::to_string(bucket_bytes) + " and " + std::to_string(first_bucket_bytes));
  }
  std::set<std::string> names;
  for (const GradientSpec& gradient : gradients) {
    const std::string who = "gradient '" + gradient.name + "'";
    if (!names.insert(gradient.name).second) {
      throw UsageError(who + " occurs twice; give every gradient a name of its own");
    }
    if (!is_floating(gradient.dtype)) {
      throw UsageError(who + " has dtype " + std::string(name_of(gradient.dtype)) +
                       "; gradients are float64, float32, float16 or bfloat16");
    }
    if (std::any_of(gradient.shape.begin(), gradient.shape.end(),
                    [](int64_t extent) { return extent < 0; })) {
      throw UsageError(who + " has a negative extent");
    }
    if (!is_dense(gradient)) {
      throw UsageError(who +
                       " has strides that leave gaps or overlap; pass those of a dense array");
    }
  }
}

}  // namespace

int64_t GradientSpec::count() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, int64_t bucket_bytes,
                        int64_t first_bucket_bytes) {
  check(gradients, bucket_bytes, first_bucket_bytes);
  std::vector<BucketLayout> closed;
  std::map<DType, BucketLayout> open;
  std::set<DType> begun;  // dtypes whose first bucket is closed
  std::vector<Placement> placements(gradients.size());

  for (auto i = static_cast<int>(gradients.size()) - 1; i >= 0; --i) {
    const GradientSpec& gradient = gradients[static_cast<size_t>(i)];
    BucketLayout& bucket = open[gradient.dtype];
    bucket.dtype = gradient.dtype;
    placements[static_cast<size_t>(i)].begin = bucket.bytes;
    placements[static_cast<size_t>(i)].position = static_cast<int>(bucket.gradients.size());
    bucket.gradients.push_back(i);
    bucket.bytes += aligned(gradient.bytes());
    const int64_t limit = begun.contains(gradient.dtype) ? bucket_bytes : first_bucket_bytes;
    if (static_cast<int64_t>(bucket.bytes) >= limit) {
      begun.insert(gradient.dtype);
      closed.push_back(std::move(bucket));
      open.erase(gradient.dtype);
    }
  }
  for (auto& [dtype, bucket] : open) closed.push_back(std::move(bucket));
  std::sort(closed.begin(), closed.end(), [](const BucketLayout& a, const BucketLayout& b) {
    return a.gradients.back() > b.gradients.back();
  });

  for (size_t number = 0; number < closed.size(); ++number) {
    BucketLayout& bucket = closed[number];
    bucket.flags_begin = bucket.bytes;
    bucket.bytes += bucket.gradients.size() * item_bytes(bucket.dtype);
    for (const int i : bucket.gradients) {
      placements[static_cast<size_t>(i)].bucket = static_cast<int>(number);
    }
  }
  return {std::move(closed), std::move(placements)};
}

}  // namespace ringdl

#include "bucket/plan.h"

#include <algorithm>
#include <set>

#include "base/buffer.h"
#include "base/error.h"
#include "bucket/storage.h"
#include "check.h"

using namespace ringdl;

namespace {

GradientSpec spec(const std::string& name, std::vector<int64_t> shape,
                  DType dtype = DType::kFloat32, std::vector<int64_t> strides = {}) {
  return {name, std::move(shape), dtype, std::move(strides)};
}

void covers_everything_once() {
  std::vector<GradientSpec> specs;
  for (int i = 0; i < 50; ++i) {
    specs.push_back(spec("g" + std::to_string(i), {i % 7, 13},
                         i % 3 == 0 ? DType::kBFloat16 : DType::kFloat32));
  }
  const BucketPlan plan = plan_buckets(specs, 1000, 200);
  std::set<int> seen;
  int last = 50;
  for (size_t number = 0; number < plan.buckets.size(); ++number) {
    const BucketLayout& bucket = plan.buckets[number];
    CHECK(bucket.gradients.back() < last);  // in the order of completion
    last = bucket.gradients.back();
    size_t end = 0;
    for (size_t position = 0; position < bucket.gradients.size(); ++position) {
      const int i = bucket.gradients[position];
      const Placement& placement = plan.placements[static_cast<size_t>(i)];
      CHECK(seen.insert(i).second);
      CHECK_EQ(static_cast<size_t>(placement.bucket), number);
      CHECK_EQ(static_cast<size_t>(placement.position), position);
      CHECK(specs[static_cast<size_t>(i)].dtype == bucket.dtype);
      CHECK_EQ(placement.begin % 64, 0u);
      CHECK(placement.begin >= end);
      end = placement.begin + specs[static_cast<size_t>(i)].bytes();
      if (position > 0) CHECK(i < bucket.gradients[position - 1]);
    }
    CHECK(bucket.flags_begin >= end);
    CHECK_EQ(bucket.bytes, bucket.flags_begin + bucket.gradients.size() * item_bytes(bucket.dtype));
  }
  CHECK_EQ(seen.size(), specs.size());
}

void closes_buckets_by_size() {
  std::vector<GradientSpec> specs(10, spec("", {16}));  // 64 bytes each
  for (size_t i = 0; i < specs.size(); ++i) specs[i].name = std::to_string(i);
  const BucketPlan plan = plan_buckets(specs, 256, 64);
  CHECK_EQ(plan.buckets.size(), 4u);
  CHECK_EQ(plan.buckets[0].gradients.size(), 1u);
  CHECK_EQ(plan.buckets[1].gradients.size(), 4u);
  CHECK_EQ(plan.buckets[0].gradients[0], 9);
  CHECK_EQ(plan_buckets({}, 1, 1).buckets.size(), 0u);
}

void refuses() {
  CHECK_THROWS(plan_buckets({spec("a", {2}, DType::kInt32)}, 1, 1), UsageError, "int32");
  CHECK_THROWS(plan_buckets({spec("a", {2}), spec("a", {2})}, 1, 1), UsageError, "twice");
  CHECK_THROWS(plan_buckets({spec("a", {-1})}, 1, 1), UsageError, "negative");
  CHECK_THROWS(plan_buckets({spec("a", {2, 2}, DType::kFloat32, {4, 1})}, 1, 1), UsageError,
               "strides");
  CHECK_THROWS(plan_buckets({spec("a", {2, 2}, DType::kFloat32, {0, 1})}, 1, 1), UsageError,
               "strides");
  CHECK_THROWS(plan_buckets({spec("a", {2})}, 0, 1), UsageError, "positive");
  CHECK_EQ(plan_buckets({spec("a", {2, 3, 4}, DType::kFloat32, {1, 8, 2})}, 1, 1).buckets.size(),
           1u);
}

void flags() {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::vector<GradientSpec> specs = {spec("a", {3}, dtype), spec("b", {5}, dtype)};
    const BucketPlan plan = plan_buckets(specs, 1 << 20, 1 << 20);
    BucketStorage storage(plan, allocate);
    std::fill_n(storage.gradient(0), specs[0].bytes(), std::byte{1});
    std::fill_n(storage.gradient(1), specs[1].bytes(), std::byte{1});
    storage.set_produced(0, true);
    storage.set_produced(1, false);
    CHECK(storage.is_produced(0) && !storage.is_produced(1));
    CHECK(*storage.gradient(0) == std::byte{1} && *storage.gradient(1) == std::byte{1});
  }
}

}  // namespace

int main() {
  covers_everything_once();
  closes_buckets_by_size();
  refuses();
  flags();
  return check::report();
}

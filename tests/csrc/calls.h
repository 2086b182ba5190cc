#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "engine/driver.h"
#include "engine/gradient_buckets.h"
#include "ranks.h"

/// What tests of several ranks share.
namespace ringdl::check {

using Shared = std::shared_ptr<Driver>;

inline constexpr int64_t kTimeout = 10 * kSecond;

inline Call sum_of(int64_t count, const std::string& name, Reduction reduction = Reduction::kSum) {
  return {Kind::kAllreduce, DType::kFloat32, reduction, -1, {count}, name};
}

inline void barrier(Driver& driver) { driver.wait(driver.submit({}, nullptr), kTimeout); }

inline void pause_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

/// Waits until `condition` holds, at most five seconds.
template <class Condition>
void until(const Condition& condition) {
  for (int i = 0; i < 5000 && !condition(); ++i) pause_ms(1);
}

/// One gradient in one bucket, summed.
inline std::unique_ptr<GradientBuckets> one_bucket(const Shared& driver, int64_t count) {
  const std::vector<GradientSpec> specs{{"g", {count}, DType::kFloat32, {}}};
  return make_buckets(driver, specs, plan_buckets(specs, 1 << 20, 1 << 20));
}

}  // namespace ringdl::check

#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bucket/plan.h"
#include "engine/bucket_memory.h"
#include "engine/driver.h"

namespace ringdl {

/// Gradients fused in buckets that are averaged (or summed) as soon as they are complete.
///
/// A round: ready(i) for each gradient that is in its place, then wait(). Each public member may be
/// called by any thread that may call the driver.
class GradientBuckets {
 public:
  /// Collective: all members of the group pass the same, which the caller has made sure of. Uses
  /// the buckets `first_number`, ... of the driver. Buckets that some member does not reach go
  /// around the ring.
  /// @param memory  made for this plan and group
  /// @param places  those of all members, in their order
  /// @param compression  what float32 is sent as between hosts: float16 or bfloat16
  GradientBuckets(std::shared_ptr<Driver> driver, std::vector<GradientSpec> gradients,
                  BucketPlan plan, std::unique_ptr<BucketMemory> memory,
                  const BucketMemory::Places& places, Reduction reduction, int64_t first_number,
                  const SharedGroup& group, std::optional<DType> compression = std::nullopt);
  ~GradientBuckets();

  const std::vector<GradientSpec>& gradients() const { return gradients_; }
  const BucketPlan& plan() const { return plan_; }
  std::byte* gradient(int index) { return storage_.gradient(index); }

  /// Gradient `index` is in its place; launches its bucket if it was the last one missing there.
  /// @throws UsageError  out of range, ready already in this round, or after shutdown()
  void ready(int index);

  /// Launches what is not launched, with zeros for the gradients that are not ready, waits for all
  /// buckets, and ends the round. Returns for each gradient whether any rank produced it. After
  /// StallError the round goes on: call again.
  std::vector<bool> wait(int64_t timeout_ns, const std::function<void()>& interrupted = {},
                         bool for_good = true);

 private:
  struct Round {
    int missing = 0;
    std::shared_ptr<Work> work;
  };

  void launch(int number, bool is_awaited);
  void begin_round();
  void refuse_failed() const;

  std::shared_ptr<Driver> driver_;
  const std::vector<GradientSpec> gradients_;
  const BucketPlan plan_;
  const int64_t first_number_;
  const std::unique_ptr<BucketMemory> memory_;
  BucketStorage& storage_;
  std::mutex mutex_;
  std::vector<bool> ready_;    // by gradient
  std::vector<Round> rounds_;  // by bucket
  std::string failure_;        // of the first bucket that failed
};

}  // namespace ringdl

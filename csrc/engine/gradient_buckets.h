#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bucket/plan.h"
#include "bucket/storage.h"
#include "engine/driver.h"

namespace ringdl {

/// Gradients fused in buckets that are averaged (or summed) as soon as they are complete.
///
/// A round: ready(i) for each gradient that is in its place, then wait(). Each public member may be
/// called by any thread that may call the driver.
class GradientBuckets {
 public:
  /// Collective: all members of the group pass the same, which the caller has made sure of. Uses
  /// the buckets `first_number`, ... of the driver. If places() is not empty,
  /// connect() comes next.
  /// @param compression  what float32 travels as between hosts: float16 or bfloat16
  GradientBuckets(std::shared_ptr<Driver> driver, std::vector<GradientSpec> gradients,
                  BucketPlan plan, Reduction reduction, int64_t first_number,
                  const SharedGroup& group, std::optional<DType> compression = std::nullopt);
  ~GradientBuckets();

  /// Where this rank's buckets are in its shared memory, and the counters for them of the first
  /// member on its host: two offsets per bucket, -1 for what is not there. Empty, on all members,
  /// if none of them share memory.
  const std::vector<int64_t>& places() const { return places_; }
  /// Buckets that some member of a host with several has elsewhere go around the ring.
  /// @param places  those of all members, in their order
  void connect(const std::vector<std::vector<int64_t>>& places);

  const std::vector<GradientSpec>& gradients() const { return gradients_; }
  const BucketPlan& plan() const { return plan_; }
  std::byte* gradient(int index) { return storage_->gradient(index); }

  /// Gradient `index` is in its place; launches its bucket if it was the last one missing there.
  /// @throws UsageError  out of range, or ready already in this round
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

  int64_t place_of(const std::byte* data) const;
  void tell_places();
  bool is_reached(size_t number, const std::vector<std::vector<int64_t>>& places) const;
  void register_bucket(size_t number, std::optional<SharedArrays> shared);
  void launch(int number);
  void begin_round();
  void refuse_failed() const;

  std::shared_ptr<Driver> driver_;
  const std::vector<GradientSpec> gradients_;
  const BucketPlan plan_;
  const int64_t first_number_;
  const Reduction reduction_;
  const std::optional<DType> compression_;
  const SharedGroup group_;
  const SharedLayout layout_;
  const bool shares_;                     // memory: some members do
  const std::shared_ptr<Window> window_;  // null: this rank shares none
  const std::shared_ptr<BucketStorage> storage_;
  std::vector<int64_t> places_;
  std::vector<std::shared_ptr<std::byte>>
      own_counters_;                      // on the first member of a host; by bucket
  std::vector<SharedCounters> counters_;  // by bucket, once connected; of none: it goes round
  std::mutex mutex_;
  std::vector<bool> ready_;    // by gradient
  std::vector<Round> rounds_;  // by bucket
  std::string failure_;        // of the first bucket that failed
};

}  // namespace ringdl

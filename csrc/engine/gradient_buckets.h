#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
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
  /// @param memory  made for this plan and group, and settled
  /// @param places  those of all members, in their order
  /// @param compression  what float32 is sent as between hosts: float16 or bfloat16
  GradientBuckets(std::shared_ptr<Driver> driver, std::vector<GradientSpec> gradients,
                  BucketPlan plan, std::unique_ptr<BucketMemory> memory,
                  const BucketMemory::ByMember& places, Reduction reduction, int64_t first_number,
                  const SharedGroup& group, std::optional<DType> compression = std::nullopt);
  ~GradientBuckets();

  const std::vector<GradientSpec>& gradients() const { return gradients_; }
  const BucketPlan& plan() const { return plan_; }
  /// Where it lies: in where()'s memory.
  std::byte* gradient(int index) { return memory_->gradient(index); }
  Memory where() const { return memory_->where(); }

  /// An array on the gradients' device, with its elements in the order of the gradient's memory.
  struct Source {
    const std::byte* data;
    DType dtype;  // the gradient's, or another: see Packing
    double scale = 1;
  };
  /// Whether ready() takes sources, and unpack() targets.
  bool packs() const;

  /// From the next round on: how many values of this rank's gradients are infinite or NaN. On a
  /// device as they are in the bucket, cast and scaled.
  /// @throws UsageError  the device has no kernels
  void count_non_finite();
  /// Of the last round that has ended.
  uint64_t non_finite() const { return non_finite_; }

  /// Gradient `index` is in its place; launches its bucket if it was the last one missing there.
  /// @param stream  of a device, in which it was computed; null: the default one
  /// @param source  where it is, if it is not in its place: it is copied there with the others of
  /// its bucket, in the stream, when the bucket is launched. It must stay as it is until then
  /// @returns whether the bucket was launched
  /// @throws UsageError  out of range, ready already in this round, after shutdown(), or the stream
  /// is being captured into a graph
  bool ready(int index, void* stream = nullptr, const std::optional<Source>& source = {});

  /// Launches what is not launched, with zeros for the gradients that are not ready, waits for all
  /// buckets, and ends the round. Returns for each gradient whether any rank produced it. After
  /// StallError the round goes on: call again.
  /// @param stream  of a device, in which the gradients of the round before are used
  std::vector<bool> wait(int64_t timeout_ns, const std::function<void()>& interrupted = {},
                         bool for_good = true, void* stream = nullptr);

  /// An array on the gradients' device, in which elements are to lie as in the gradient's memory.
  struct Target {
    int index;
    std::byte* data;
    DType dtype;  // as Source's
  };
  /// After wait(): copies gradients to where they are used, in a stream.
  /// @throws UsageError  out of range, or packs() is false
  void unpack(void* stream, std::span<const Target> targets, double scale);

 private:
  struct Round {
    int missing = 0;
    std::shared_ptr<Work> work;
  };
  struct RoundOnDevice {
    std::map<void*, std::unique_ptr<Mark>> marks = {};  // of the streams that compute gradients
    std::map<std::tuple<void*, DType, double>, std::vector<PackItem>> sources = {};
  };

  void refuse_source(int index, DType dtype) const;
  void refuse_index(const char* call, int index) const;
  void mark(int number, void* stream);
  void note_source(int index, void* stream, const std::optional<Source>& source);
  void launch(int number, bool is_awaited);
  void fill(int number);
  void pack(int number);
  void begin_round();
  void note_failure(const Error& error);
  void refuse_failed() const;

  std::shared_ptr<Driver> driver_;
  const std::vector<GradientSpec> gradients_;
  const BucketPlan plan_;
  const int64_t first_number_;
  const std::unique_ptr<BucketMemory> memory_;
  BucketStorage& storage_;
  bool is_packing_ = false;
  std::shared_ptr<uint64_t> counter_;  // of the round, if it is counted
  std::atomic<uint64_t> non_finite_ = 0;
  std::mutex mutex_;
  std::vector<bool> ready_;    // by gradient
  std::vector<Round> rounds_;  // by bucket
  std::vector<RoundOnDevice> on_device_;
  std::string failure_;  // of the first bucket that failed
};

}  // namespace ringdl

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "collective/shared/shared_counters.h"
#include "engine/matching.h"
#include "engine/planning.h"
#include "engine/tags.h"
#include "engine/work_table.h"
#include "reduce/codec.h"
#include "reduce/executor.h"

namespace ringdl {

/// When the gradients of a bucket on a device are there: once the streams in which they are
/// computed are past what was there when the bucket was launched.
class Arrival {
 public:
  void add(std::unique_ptr<Mark> mark) { marks_.push_back(std::move(mark)); }
  /// A gradient that is missing, and becomes zero then.
  void add_missing(std::byte* gradient, size_t bytes) { missing_.push_back({gradient, bytes}); }

  /// Whether all is there, as seen by what the executor is asked for from now on.
  bool is_over(Executor& executor) {
    if (!std::ranges::all_of(marks_, [](auto& mark) { return mark->is_passed(); })) return false;
    marks_.clear();
    for (const auto& missing : missing_) executor.zero(missing.data(), missing.size());
    missing_.clear();
    return true;
  }

 private:
  std::vector<std::unique_ptr<Mark>> marks_;
  std::vector<std::span<std::byte>> missing_;
};

/// What else there is of a bucket whose gradients lie on a device.
struct BucketOnDevice {
  int device;
  std::shared_ptr<std::byte> gradients;
  size_t gradient_bytes;            // then its flags
  std::shared_ptr<std::byte> here;  // in the CPU's memory: the bucket, or its flags
  /// How they are reduced: there, between copies of the flags, or here, between copies of the
  /// gradients.
  enum class Way : uint8_t { kHere, kDirect, kByLibrary } way;
  std::shared_ptr<Arrival> arrival;  // of the instance that is launched last

  bool is_there() const { return way != Way::kHere; }
};

/// Describes a bucket: the same on all members of its group, except the memory.
struct BucketSpec {
  std::shared_ptr<const void> memory;  // keeps `data` alive for as long as messages are under way
  void* data = nullptr;                // where it is reduced
  size_t bytes = 0;
  DType dtype = DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  Codec codec;
  std::string label;
  SharedGroup group;
  /// Where the members of this host have theirs, if they share memory.
  std::optional<SharedArrays> shared = std::nullopt;
  std::optional<BucketOnDevice> on_device = std::nullopt;
};

/// The buckets of one rank. Each instance of one is prepared as soon as the one before has ended,
/// so that its first receives are posted when the previous rank launches. A bucket with a failed
/// instance cannot be used any more: it has no headers to distinguish rounds.
class BucketTable {
 public:
  BucketTable(WorkTable& works, Matching& matching, Planning& planning, const TagLayout& tags)
      : works_(works), matching_(matching), planning_(planning), tags_(tags) {}

  /// @throws UsageError  the number is taken
  void add(int64_t number, BucketSpec spec);
  /// Takes the prepared instance, which the caller begins.
  /// @throws UsageError  no such bucket, or its last instance is in flight
  /// @throws MismatchError, RankFailedError  it has failed
  std::shared_ptr<Work> take_prepared(int64_t number);
  /// Forgets a bucket. Returns its instance in flight, if there is one.
  std::shared_ptr<Work> remove(int64_t number);
  /// Forgets all, none of which is in flight.
  void clear();

  /// An instance has ended.
  void on_end(const Key& key, const Failure& why);
  /// The next instance is known to fail.
  void on_failure(const Key& key, const Failure& why);

  /// On a rank that has joined: another rank has launched this instance.
  void on_launched(const Key& key);
  /// A bucket that others have launched and this rank has not, filled with zeros; nothing if there
  /// is none.
  std::optional<int64_t> next_to_answer();
  /// Calls for each instance in flight.
  void for_each_running(const std::function<void(const Work&)>& act) const;

  /// The largest number that a bucket may have on this transport.
  int64_t most() const { return tags_.buckets - 1; }

 private:
  struct Bucket {
    BucketSpec spec;
    std::shared_ptr<Work> prepared;  // the next instance, with receives posted
    std::shared_ptr<Work> running;
    Failure failure;                  // set once an instance has failed
    uint64_t launched_elsewhere = 0;  // instances, as far as a joined rank knows
  };

  void prepare(int64_t number, Bucket& bucket);
  static void unprepare(Bucket& bucket);

  WorkTable& works_;
  Matching& matching_;
  Planning& planning_;
  const TagLayout& tags_;
  std::map<int64_t, Bucket> buckets_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "collective/collective.h"
#include "collective/planner/algorithms.h"
#include "collective/planner/choice.h"
#include "engine/call.h"
#include "engine/hosts.h"

namespace ringdl {

struct BucketSpec;

/// Which algorithm carries a call out, and how it is cut: by costs, what was asked for, and which
/// ranks share memory. All of these are the same on all ranks, so all plan alike.
class Planning {
 public:
  /// @param executor  carries out what collectives do with payload
  Planning(Hosts& hosts, Executor& executor, size_t segment_bytes)
      : hosts_(hosts), executor_(executor), segment_bytes_(segment_bytes) {}

  /// @param wanted  taken wherever it is possible and the call names none; else the fastest by the
  /// model
  void choose_by(const CostModel& costs, std::optional<Algorithm> wanted);
  /// What travels and is reduced at once.
  /// @throws UsageError  not between 1 and 2^30
  void set_segment_bytes(size_t bytes);
  size_t segment_bytes() const { return segment_bytes_; }

  /// Whether ranks may meet in slots: unless an algorithm is asked for, as slots are none.
  bool may_use_slots() const { return !wanted_; }
  /// Of an allreduce.
  Algorithm algorithm_for(size_t bytes, const HostLayout& layout) const;

  /// The state machine for a call.
  /// @param data  as in Driver::submit()
  /// @param group  the call's, never null
  std::unique_ptr<Collective> make(const Call& call, const Description& description, void* data,
                                   const Group& group) const;
  /// The state machine for an instance of a bucket.
  std::unique_ptr<Collective> make(const BucketSpec& bucket, uint64_t instance) const;

 private:
  Hosts& hosts_;
  Executor& executor_;
  CostModel costs_ = default_costs();
  std::optional<Algorithm> wanted_;
  size_t segment_bytes_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "collective/collective.h"
#include "collective/planner/plan.h"
#include "engine/call.h"
#include "engine/hosts.h"

namespace ringdl {

struct BucketSpec;
struct SlotCall;

/// Plans, and the state machines that carry them out. All that a plan follows from is the same on
/// all ranks, so all plan alike.
class Planning {
 public:
  /// @param executor  carries out what collectives do with payload
  Planning(Hosts& hosts, Executor& executor, size_t segment_bytes)
      : hosts_(hosts), executor_(executor), table_{.wanted = {}, .segment_bytes = segment_bytes} {}

  /// @param wanted  taken wherever it is possible and the call names none; else the fastest by the
  /// costs
  void choose_by(const CostModel& costs, std::optional<Algorithm> wanted);
  /// What travels and is reduced at once.
  /// @throws UsageError  not between 1 and 2^30
  void set_segment_bytes(size_t bytes);

  /// Of an allreduce.
  /// @param may_use_slots  as in AllreduceRequest
  Plan plan(const Call& call, const Group& group, bool may_use_slots = false);

  /// The state machine for a call.
  /// @param data  as in Driver::submit()
  /// @param group  the call's, never null
  /// @param slot_call  of an allreduce whose ranks meet in slots
  std::unique_ptr<Collective> make(const Call& call, const Description& description, void* data,
                                   const Group& group, const SlotCall* slot_call = nullptr) const;
  /// The state machine for an instance of a bucket.
  std::unique_ptr<Collective> make(const BucketSpec& bucket, uint64_t instance) const;

 private:
  Hosts& hosts_;
  Executor& executor_;
  PlanningTable table_;
};

}  // namespace ringdl

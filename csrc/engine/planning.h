#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

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
  /// @param devices  the same of arrays that lie on devices; may be null
  /// @param slab_bytes  what is copied from and to devices at once
  Planning(Hosts& hosts, Executor& executor, std::shared_ptr<DeviceExecutors> devices,
           size_t segment_bytes, size_t slab_bytes)
      : hosts_(hosts),
        executor_(executor),
        devices_(std::move(devices)),
        slab_bytes_(slab_bytes),
        table_{.wanted = {}, .segment_bytes = segment_bytes} {}

  /// @param wanted  taken wherever it is possible and the call names none; else the fastest by the
  /// costs
  /// @param library_bytes  from which on arrays on devices are reduced by another library (NCCL),
  /// where all ranks can use it; all are, if that is wanted
  void choose_by(const CostModel& costs, std::optional<Algorithm> wanted,
                 size_t library_bytes = std::numeric_limits<size_t>::max());
  /// Whether an array on a device is to be reduced by that library.
  bool chooses_library(DType dtype, Reduction reduction, size_t bytes, const Group& group) const;
  /// What travels and is reduced at once.
  /// @throws UsageError  not between 1 and 2^30
  void set_segment_bytes(size_t bytes);

  size_t segment_bytes() const { return table_.segment_bytes; }

  /// Of an allreduce.
  /// @param may_use_slots  as in AllreduceRequest
  Plan plan(const Call& call, const Group& group, bool may_use_slots = false) const;

  /// The state machine for a call.
  /// @param data  as in Driver::submit()
  /// @param group  the call's, never null
  /// @param slot_call  of an allreduce whose ranks meet in slots
  std::unique_ptr<Collective> make(const Call& call, const Description& description, void* data,
                                   const Group& group, const SlotCall* slot_call = nullptr) const;
  /// The state machine for an instance of a bucket.
  std::unique_ptr<Collective> make(const BucketSpec& bucket, uint64_t instance) const;
  /// An array that adds nothing, for a call: in its memory, and of a device on that of the arrays
  /// that were met last.
  /// @param output  room for as much follows
  /// @throws UsageError, OutOfMemory  of a device
  std::shared_ptr<std::byte> neutral_array(Call& call, bool output);
  /// Makes a bucket what a rank contributes that has nothing.
  void zero(const BucketSpec& bucket) const;
  /// See choose_by().
  std::optional<Algorithm> wanted() const { return table_.wanted; }

 private:
  Plan plan_without_library(const Call& call, const Group& group, bool may_use_slots) const;

  Hosts& hosts_;
  Executor& executor_;
  const std::shared_ptr<DeviceExecutors> devices_;
  const size_t slab_bytes_;
  PlanningTable table_;
  size_t library_bytes_ = std::numeric_limits<size_t>::max();
  mutable int last_device_ = 0;
};

}  // namespace ringdl

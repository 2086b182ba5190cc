#pragma once

#include <cstdint>
#include <memory>

#include "collective/shared/slot_allreduce.h"
#include "collective/two_level/host_allreduce.h"
#include "engine/hosts.h"
#include "engine/matching.h"
#include "engine/planning.h"
#include "engine/submitter.h"
#include "engine/work_table.h"

namespace ringdl {

/// Unnamed allreduces of all ranks of one host whose caller waits at once. Ranks meet in slots, and
/// the caller polls the allreduce itself: no message, and no work unless it takes long.
///
///     plan -> begin -> the caller polls -> finish, or submit: a work like any other
class Immediate {
 public:
  /// All of these outlive this.
  Immediate(const SharedGroup& all, Executor& executor, Hosts& hosts, Planning& planning,
            Matching& matching, WorkTable& works, Submitter& submitter)
      : all_(all),
        executor_(executor),
        hosts_(hosts),
        planning_(planning),
        matching_(matching),
        works_(works),
        submitter_(submitter) {}

  Key next_key(const Call& call) { return submitter_.next_key(call, *all_); }
  /// How the call is carried out. If ranks do not meet in slots, it has to be submitted.
  Plan plan(const Call& call, const Key& key);

  /// For kArraysInSlots: polled until it is neither kAwaitsRanks nor kUnderWay.
  SmallAllreduce begin_small(const Call& call, const Key& key, void* data) const;
  /// For kPlacesInSlots: likewise.
  std::unique_ptr<HostAllreduce> begin_direct(const Call& call, const Key& key, void* data) const;

  /// It is done.
  /// @param begin_ns, now_ns  for the trace and the flight recorder, if they are on
  void finish(const Call& call, const Key& key, Meeting meeting, int64_t begin_ns, int64_t now_ns);
  /// It is not, because a rank is late or goes another way: a work from now on.
  std::shared_ptr<Work> submit(const Call& call, const Key& key, void* data,
                               const SmallAllreduce& small);
  std::shared_ptr<Work> submit(const Call& call, const Key& key,
                               std::unique_ptr<HostAllreduce> direct);

  /// A call that ranks might meet in slots for, and that this one submits instead.
  void pass(const Call& call, const Key& key, const Group& group);

 private:
  SlotCall slot_call_of(const Call& call, const Key& key, Meeting meeting) const;
  std::shared_ptr<Work> submit(const Call& call, const Key& key,
                               std::unique_ptr<Collective> collective);
  void record(const Call& call, const Key& key, int64_t begin_ns, int64_t end_ns);

  const SharedGroup& all_;
  Executor& executor_;
  Hosts& hosts_;
  Planning& planning_;
  Matching& matching_;
  WorkTable& works_;
  Submitter& submitter_;
  std::weak_ptr<Work> last_;  // work that has put something into a slot
};

}  // namespace ringdl

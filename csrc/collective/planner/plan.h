#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "collective/algorithm.h"
#include "collective/host_layout.h"
#include "collective/planner/choice.h"

namespace ringdl {

/// How ranks come to know that all have made a call.
enum class Meeting : uint8_t {
  kHeaders,        // a message of each, matched by key
  kArraysInSlots,  // in shared memory; what is reduced lies there, too
  kPlacesInSlots,  // in shared memory; each tells where its array is
  kBeforehand      // they have agreed for good: buckets
};

/// How an allreduce is carried out. What only arrival reveals is a branch inside the algorithm:
/// whose arrays lie in shared memory, and a rank that makes the call in another way.
struct Plan {
  Meeting meeting;
  Algorithm algorithm;
};

/// What plans follow from besides the call; the same on all ranks.
struct PlanningTable {
  CostModel costs = default_costs();
  /// Taken wherever it is possible and the call names none; else the fastest by the costs.
  std::optional<Algorithm> wanted;
  size_t segment_bytes = 0;
};

/// What is asked for; the same on all ranks, but for `may_use_slots`, of which they tell one
/// another by the slots themselves.
struct AllreduceRequest {
  size_t bytes;
  std::optional<Algorithm> algorithm;  // that the call names
  bool may_use_slots = false;          // all ranks share memory, and the caller waits at once
};

/// Pure: the same arguments give the same plan on all ranks.
Plan plan_allreduce(const AllreduceRequest& request, const HostLayout& layout,
                    const PlanningTable& table);

/// Of a bucket: the fastest of the algorithms that use memory agreed beforehand, if that is
/// reached, else the ring.
/// @param is_reached  whether the ranks of each host reach all arrays of that host
Plan plan_bucket(size_t bytes, bool is_reached, const HostLayout& layout,
                 const PlanningTable& table);

}  // namespace ringdl

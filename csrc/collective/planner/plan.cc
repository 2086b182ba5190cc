#include "collective/planner/plan.h"

#include "collective/planner/algorithms.h"
#include "collective/shared/slots.h"

namespace ringdl {

Plan plan_allreduce(const AllreduceRequest& request, const HostLayout& layout,
                    const PlanningTable& table) {
  if (request.algorithm) return {Meeting::kHeaders, *request.algorithm};
  const bool may_use_slots = request.may_use_slots && !table.wanted;
  if (may_use_slots && request.bytes <= Slots::most_bytes(layout.size())) {
    return {Meeting::kArraysInSlots, Algorithm::kDirect};
  }
  if (table.wanted && is_possible(*table.wanted, request.bytes, layout, table.segment_bytes)) {
    return {Meeting::kHeaders, *table.wanted};
  }
  const Algorithm fastest =
      choose_allreduce(table.costs, request.bytes, layout, table.segment_bytes);
  const bool is_direct = may_use_slots && fastest == Algorithm::kDirect;
  return {is_direct ? Meeting::kPlacesInSlots : Meeting::kHeaders, fastest};
}

Plan plan_bucket(size_t bytes, bool is_reached, const HostLayout& layout,
                 const PlanningTable& table) {
  if (!is_reached || table.wanted == Algorithm::kRing) {
    return {Meeting::kBeforehand, Algorithm::kRing};
  }
  const auto may_run = [&](const AllreduceAlgorithm& its) {
    return its.uses_agreed_memory && its.can_run(layout);
  };
  return {Meeting::kBeforehand, fastest(table.costs, bytes, layout, may_run)};
}

}  // namespace ringdl

#include "engine/planning.h"

#include <string>

#include "base/error.h"
#include "collective/planner/algorithms.h"
#include "engine/bucket_table.h"
#include "engine/make_collective.h"
#include "transport/transport.h"

namespace ringdl {

void Planning::choose_by(const CostModel& costs, std::optional<Algorithm> wanted) {
  table_.costs = costs;
  table_.wanted = wanted;
}

void Planning::set_segment_bytes(size_t bytes) {
  if (bytes == 0 || bytes > Transport::kMaxMessageBytes) {
    throw UsageError("segment_bytes must be between 1 and 2^30, not " + std::to_string(bytes));
  }
  table_.segment_bytes = bytes;
}

Plan Planning::plan(const Call& call, const Group& group, bool may_use_slots) {
  return plan_allreduce({bytes_of(call), call.algorithm, may_use_slots}, *hosts_.layout_of(group),
                        table_);
}

std::unique_ptr<Collective> Planning::make(const Call& call, const Description& description,
                                           void* data, const Group& group,
                                           const SlotCall* slot_call) const {
  const SharedLayout layout = hosts_.layout_of(group);
  const bool shares_memory = layout->hosts.size() < group.ranks.size();
  return make_collective({executor_, table_.segment_bytes,
                          shares_memory ? hosts_.window() : nullptr, layout, slot_call},
                         call, description, data, group);
}

std::unique_ptr<Collective> Planning::make(const BucketSpec& bucket, uint64_t instance) const {
  const Group& group = *bucket.group;
  const SharedLayout layout = hosts_.layout_of(group);
  const Plan plan = plan_bucket(bucket.bytes, bucket.shared.has_value(), *layout, table_);
  return algorithm_of(plan.algorithm)
      .make({.executor = executor_,
             .data = static_cast<std::byte*>(bucket.data),
             .bytes = bucket.bytes,
             .reducer = Reducer(bucket.dtype, bucket.reduction, group.size()),
             .reduce_many = over_host(bucket.dtype, bucket.reduction, *layout),
             .codec = bucket.codec,
             .segment_bytes = table_.segment_bytes,
             .rank = group.rank,
             .size = group.size(),
             .ranks = group.ranks,
             .window = hosts_.window(),
             .layout = layout,
             .agreed = bucket.shared ? &*bucket.shared : nullptr,
             .instance = instance});
}

}  // namespace ringdl

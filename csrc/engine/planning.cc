#include "engine/planning.h"

#include <string>

#include "base/error.h"
#include "collective/messages/ring_allreduce.h"
#include "collective/shared/direct_allreduce.h"
#include "collective/two_level/hierarchical_allreduce.h"
#include "engine/bucket_table.h"
#include "engine/make_collective.h"
#include "transport/transport.h"

namespace ringdl {

void Planning::choose_by(const CostModel& costs, std::optional<Algorithm> wanted) {
  costs_ = costs;
  wanted_ = wanted;
}

void Planning::set_segment_bytes(size_t bytes) {
  if (bytes == 0 || bytes > Transport::kMaxMessageBytes) {
    throw UsageError("segment_bytes must be between 1 and 2^30, not " + std::to_string(bytes));
  }
  segment_bytes_ = bytes;
}

Algorithm Planning::algorithm_for(size_t bytes, const HostLayout& layout) const {
  if (wanted_ && is_possible(*wanted_, bytes, layout, segment_bytes_)) return *wanted_;
  return choose_allreduce(costs_, bytes, layout, segment_bytes_);
}

std::unique_ptr<Collective> Planning::make(const Call& call, const Description& description,
                                           void* data, const Group& group) const {
  const SharedLayout layout = hosts_.layout_of(group);
  const bool shares_memory = layout->hosts.size() < group.ranks.size();
  return make_collective(executor_, call, description, data, group, segment_bytes_,
                         shares_memory ? hosts_.window() : nullptr, layout);
}

std::unique_ptr<Collective> Planning::make(const BucketSpec& bucket, uint64_t instance) const {
  const Group& group = *bucket.group;
  auto* const data = static_cast<std::byte*>(bucket.data);
  const Reducer reducer(bucket.dtype, bucket.reduction, group.size());
  if (!bucket.shared || wanted_ == Algorithm::kRing) {
    return std::make_unique<RingAllreduce>(executor_, data, bucket.bytes, reducer, group.rank,
                                           group.size(), segment_bytes_, bucket.codec);
  }
  if (hosts_.share_memory(group)) {
    const ReduceMany reduce_many(bucket.dtype, bucket.reduction, group.size());
    return std::make_unique<DirectAllreduce>(executor_, *bucket.shared, instance, bucket.bytes,
                                             reduce_many, group.rank);
  }
  const ReduceMany reduce_many(bucket.dtype, undivided(bucket.dtype, bucket.reduction), 1);
  return std::make_unique<HierarchicalAllreduce>(
      executor_, hosts_.layout_of(group), LocalArrays{*bucket.shared, data, false}, instance,
      bucket.bytes, reduce_many, reducer, segment_bytes_, bucket.codec);
}

}  // namespace ringdl

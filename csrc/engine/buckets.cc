#include <algorithm>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "collective/direct_allreduce.h"
#include "collective/hierarchical_allreduce.h"
#include "collective/ring_allreduce.h"
#include "engine/engine.h"

namespace ringdl {

void Engine::add_bucket(int64_t number, std::shared_ptr<const void> memory, void* data,
                        size_t bytes, DType dtype, Reduction reduction, Codec codec,
                        const std::string& label, const SharedGroup& group,
                        std::optional<SharedArrays> shared) {
  Lock lock = lock_for_call();
  if (buckets_.contains(number)) {
    throw UsageError("bucket " + std::to_string(number) + " exists already");
  }
  Bucket& bucket = buckets_[number];
  bucket.memory = std::move(memory);
  bucket.data = static_cast<std::byte*>(data);
  bucket.bytes = bytes;
  bucket.dtype = dtype;
  bucket.reduction = reduction;
  bucket.codec = codec;
  bucket.label = label;
  bucket.group = group;
  bucket.shared = std::move(shared);
  const Key key{KeySpace::kBucket, static_cast<uint64_t>(number), 0};
  bucket.failure = matching_.take(key).failure.text;  // another rank has dropped it already
  if (bucket.failure.empty()) prepare_bucket(number, bucket);
}

// The next instance's work is made as soon as the one before is done, so that its first receives
// are posted when the previous rank launches.
void Engine::prepare_bucket(int64_t number, Bucket& bucket) {
  const Key key = matching_.next(KeySpace::kBucket, static_cast<uint64_t>(number));
  const Group& group = *bucket.group;
  Description description;
  description.kind = Kind::kAllreduce;
  description.dtype = bucket.dtype;
  description.count = static_cast<int64_t>(bucket.bytes / item_bytes(bucket.dtype));
  description.reduction = bucket.reduction;
  set_name(description, bucket.label);
  auto work = std::make_shared<Work>(next_id_++, key, description, bucket.group);
  work->state = Work::State::kPrepared;
  work->memory = bucket.memory;
  work->bucket_channel = std::make_unique<BucketChannel>(
      context(bucket.group), tag_layout_.bucket_tag(number, key.instance),
      [this, raw = work.get()] { touch(*raw); });
  work->collective = make_bucket_collective(bucket, key.instance);
  if (group.size() > 1) work->collective->prepare(*work->bucket_channel);
  bucket.running.reset();
  bucket.prepared = std::move(work);
}

std::unique_ptr<Collective> Engine::make_bucket_collective(const Bucket& bucket,
                                                           uint64_t instance) {
  const Group& group = *bucket.group;
  const Reducer reducer(bucket.dtype, bucket.reduction, group.size());
  if (!bucket.shared || wanted_ == Algorithm::kRing) {
    return std::make_unique<RingAllreduce>(bucket.data, bucket.bytes, reducer, group.rank,
                                           group.size(), options_.segment_bytes, bucket.codec);
  }
  if (shares_memory(group)) {
    const Join join(bucket.dtype, bucket.reduction, group.size());
    return std::make_unique<DirectAllreduce>(*bucket.shared, instance, bucket.bytes, join,
                                             group.rank);
  }
  const Join join(bucket.dtype, undivided(bucket.dtype, bucket.reduction), 1);
  return std::make_unique<HierarchicalAllreduce>(
      find_layout(group), LocalArrays{*bucket.shared, bucket.data, false}, instance, bucket.bytes,
      join, reducer, options_.segment_bytes, bucket.codec);
}

std::shared_ptr<Work> Engine::launch_bucket(int64_t number) {
  Lock lock = lock_for_call();
  const auto found = buckets_.find(number);
  if (found == buckets_.end()) throw UsageError("there is no bucket " + std::to_string(number));
  Bucket& bucket = found->second;
  if (!bucket.failure.empty()) {
    throw MismatchError(bucket.failure);
  }
  if (!bucket.prepared) {
    throw UsageError(bucket.label + " is in flight; wait for it before launching it again");
  }
  note_submitter();
  return launch(bucket);
}

std::shared_ptr<Work> Engine::launch(Bucket& bucket) {
  const std::shared_ptr<Work> work = std::exchange(bucket.prepared, nullptr);
  bucket.running = work;
  tell_joined_ranks(*work);
  matching_.advance(work->key);
  work->begin_ns = now_ns();
  in_flight_[work->key] = work;
  work->state = Work::State::kRunning;
  if (!step(work)) {
    check_previous_left(work);
    progress();
  }
  return work;
}

void Engine::remove_bucket(int64_t number) {
  refuse_forked_child();
  if (closed_.load()) return;
  Lock lock = lock_for_call();
  const auto found = buckets_.find(number);
  if (found == buckets_.end()) return;
  Bucket& bucket = found->second;
  if (bucket.prepared) bucket.prepared->bucket_channel->abort();
  const std::shared_ptr<Work> running = bucket.running;
  buckets_.erase(found);
  if (running && !running->ended()) {
    fail_everywhere(*running, {running->label() + " was dropped on rank " + std::to_string(rank_) +
                               " while in flight; keep the buckets until wait() has returned"});
  }
}

}  // namespace ringdl

#include "engine/bucket_table.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

Key key_of(int64_t number) { return {KeySpace::kBucket, static_cast<uint64_t>(number), 0}; }
int64_t number_of(const Key& key) { return static_cast<int64_t>(key.hash); }

}  // namespace

void BucketTable::add(int64_t number, BucketSpec spec) {
  if (buckets_.contains(number)) {
    throw UsageError("bucket " + std::to_string(number) + " exists already");
  }
  Bucket& bucket = buckets_[number];
  bucket.spec = std::move(spec);
  bucket.failure = matching_.take(key_of(number)).failure;  // dropped elsewhere already
  if (!bucket.failure) prepare(number, bucket);
}

void BucketTable::prepare(int64_t number, Bucket& bucket) {
  const BucketSpec& spec = bucket.spec;
  const Key key = matching_.next(KeySpace::kBucket, static_cast<uint64_t>(number));
  Description description;
  description.kind = Kind::kAllreduce;
  description.dtype = spec.dtype;
  description.count = static_cast<int64_t>(spec.bytes / item_bytes(spec.dtype));
  description.reduction = spec.reduction;
  description.memory = spec.on_device ? MemoryKind::kDevice : MemoryKind::kCpu;
  set_name(description, spec.label);
  auto work =
      works_.make_prepared(description, key, spec.group, tags_.bucket_tag(number, key.instance));
  work->memory = spec.memory;
  work->collective = planning_.make(spec, key.instance);
  if (spec.group->size() > 1) work->collective->prepare(*work->bucket_channel);
  bucket.running.reset();
  bucket.prepared = std::move(work);
}

void BucketTable::unprepare(Bucket& bucket) {
  if (bucket.prepared) bucket.prepared->bucket_channel->abort();
  bucket.prepared.reset();
}

std::shared_ptr<Work> BucketTable::take_prepared(int64_t number) {
  const auto found = buckets_.find(number);
  if (found == buckets_.end()) throw UsageError("there is no bucket " + std::to_string(number));
  Bucket& bucket = found->second;
  if (bucket.failure) bucket.failure.raise();
  if (!bucket.prepared) {
    throw UsageError(bucket.spec.label + " is in flight; wait for it before launching it again");
  }
  bucket.running = std::exchange(bucket.prepared, nullptr);
  return bucket.running;
}

std::shared_ptr<Work> BucketTable::remove(int64_t number) {
  const auto found = buckets_.find(number);
  if (found == buckets_.end()) return nullptr;
  unprepare(found->second);
  std::shared_ptr<Work> running = std::move(found->second.running);
  buckets_.erase(found);
  return running && !running->ended() ? running : nullptr;
}

void BucketTable::clear() {
  for (auto& [number, bucket] : buckets_) unprepare(bucket);
  buckets_.clear();
}

void BucketTable::on_end(const Key& key, const Failure& why) {
  const auto found = buckets_.find(number_of(key));
  if (found == buckets_.end()) return;
  if (why) {
    found->second.failure = why;
  } else {
    prepare(found->first, found->second);
  }
}

void BucketTable::on_failure(const Key& key, const Failure& why) {
  const auto found = buckets_.find(number_of(key));
  if (found == buckets_.end()) return;  // not made yet, or removed
  found->second.failure = why;
  unprepare(found->second);
}

void BucketTable::on_launched(const Key& key) {
  const auto found = buckets_.find(number_of(key));
  if (found == buckets_.end()) return;
  uint64_t& launched = found->second.launched_elsewhere;
  launched = std::max(launched, key.instance + 1);
}

std::optional<int64_t> BucketTable::next_to_answer() {
  for (auto& [number, bucket] : buckets_) {
    if (!bucket.prepared || bucket.prepared->key.instance >= bucket.launched_elsewhere) continue;
    planning_.zero(bucket.spec);
    return number;
  }
  return std::nullopt;
}

void BucketTable::for_each_running(const std::function<void(const Work&)>& act) const {
  for (const auto& [number, bucket] : buckets_) {
    if (bucket.running && !bucket.running->ended()) act(*bucket.running);
  }
}

}  // namespace ringdl

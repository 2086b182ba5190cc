#include "engine/immediate.h"

#include <algorithm>
#include <utility>

namespace ringdl {

Plan Immediate::plan(const Call& call, const Key& key) {
  bool may_use_slots = hosts_.slots() && has_reduction(call.dtype, call.reduction) &&
                       executor_.is_immediate() && !matching_.is_known_to_fail(key);
  if (may_use_slots && !last_.expired()) {
    const std::shared_ptr<Work> last = last_.lock();
    may_use_slots = !last || last->ended();
  }
  return planning_.plan(call, *all_, may_use_slots);
}

// Ranks that would put something else there find so, and fall back to headers.
SlotCall Immediate::slot_call_of(const Call& call, const Key& key, Meeting meeting) const {
  return {hosts_.slots(), key.instance, digest_of(call) + static_cast<uint64_t>(meeting)};
}

SmallAllreduce Immediate::begin_small(const Call& call, const Key& key, void* data) const {
  return {slot_call_of(call, key, Meeting::kArraysInSlots), static_cast<std::byte*>(data),
          bytes_of(call), ReduceMany(call.dtype, call.reduction, all_->size()), all_->rank};
}

std::unique_ptr<HostAllreduce> Immediate::begin_direct(const Call& call, const Key& key,
                                                       void* data) const {
  const SlotCall slot_call = slot_call_of(call, key, Meeting::kPlacesInSlots);
  Description description;
  description.algorithm = Algorithm::kDirect;
  // HostAllreduce carries out kDirect wherever the arrays lie.
  auto made = planning_.make(call, description, data, *all_, &slot_call);
  return std::unique_ptr<HostAllreduce>(static_cast<HostAllreduce*>(made.release()));
}

void Immediate::finish(const Call& call, const Key& key, Meeting meeting, int64_t begin_ns,
                       int64_t now_ns) {
  matching_.advance(key);
  matching_.take(key);  // a rank that has waited for longer has sent its header
  works_.count_unseen();
  if (works_.recorder().is_on()) record(call, key, begin_ns, now_ns);
  if (!works_.trace().is_on()) return;
  works_.trace().add({works_.next_id(), label_of(key, submitter_.header_of(call), *all_),
                      meeting == Meeting::kArraysInSlots ? "slots" : "direct",
                      static_cast<int64_t>(bytes_of(call)), begin_ns, now_ns});
}

// What describe() says, but for digests, in some nanoseconds.
void Immediate::record(const Call& call, const Key& key, int64_t begin_ns, int64_t end_ns) {
  Description description;
  description.kind = call.kind;
  description.dtype = call.dtype;
  description.reduction = call.reduction;
  description.wire = call.dtype;
  description.memory = call.memory.kind;
  description.count = 1;
  description.dimensions = static_cast<int32_t>(call.shape.size());
  std::copy_n(call.shape.begin(), std::min<size_t>(call.shape.size(), kMaxDimensions),
              description.shape);
  FlightRecorder& recorder = works_.recorder();
  recorder.end(recorder.begin(key, description, *all_, begin_ns), end_ns);
}

std::shared_ptr<Work> Immediate::submit(const Call& call, const Key& key, void* data,
                                        const SmallAllreduce& small) {
  return submit(call, key, std::make_unique<SlotAllreduce>(small, [this, call, data] {
                  return planning_.make(call, submitter_.header_of(call), data, *all_);
                }));
}

std::shared_ptr<Work> Immediate::submit(const Call& call, const Key& key,
                                        std::unique_ptr<HostAllreduce> direct) {
  return submit(call, key, std::unique_ptr<Collective>(std::move(direct)));
}

std::shared_ptr<Work> Immediate::submit(const Call& call, const Key& key,
                                        std::unique_ptr<Collective> collective) {
  auto work = submitter_.submit_begun(key, submitter_.header_of(call), all_, std::move(collective),
                                      nullptr);
  last_ = work;
  return work;
}

void Immediate::pass(const Call& call, const Key& key, const Group& group) {
  const bool is_in_slots = hosts_.slots() && call.kind == Kind::kAllreduce &&
                           key.space == KeySpace::kUnnamed && group.is_all();
  if (is_in_slots) hosts_.slots()->pass(key.instance);
}

}  // namespace ringdl

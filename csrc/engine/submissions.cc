#include "engine/submissions.h"

#include <algorithm>
#include <utility>

#include "base/buffer.h"
#include "base/error.h"
#include "engine/failures.h"
#include "engine/inbox.h"
#include "engine/parts.h"

namespace ringdl {

// As many headers may be parked at a peer, and as many tags can be granted.
void Submissions::refuse_many() const {
  if (parts_.works.in_flight().size() < static_cast<size_t>(parts_.tags.pooled)) return;
  throw UsageError(std::to_string(parts_.tags.pooled) +
                   " works are in flight on this rank; wait for some before submitting more");
}

std::shared_ptr<Work> Submissions::submit(const Call& call, void* data) {
  refuse_many();
  const size_t in_flight = parts_.works.in_flight().size();
  const SharedGroup& group = call.group ? call.group : parts_.all;
  if (call.from_any) return parts_.any_receives.submit(call, data, group);
  const Description description = header_of(call);
  std::shared_ptr<Buffer> stand_in;  // see row_bytes()
  if (has_uneven_rows(call.kind) && bytes_of(call) > 0 && description.count == 0) {
    stand_in = std::make_shared<Buffer>(bytes_of(call));
    std::fill_n(stand_in->data(), stand_in->size(), std::byte{0});
    data = stand_in->data();
  }
  if (description.algorithm == Algorithm::kMpi && parts_.mailbox.open_boxes() > 0) {
    throw UsageError(
        "MPI's own allreduce cannot be used beside a policy by which ranks of several hosts train "
        "at their own pace, as this rank answers others meanwhile: take another algorithm");
  }
  if (description.algorithm == Algorithm::kMpi && in_flight > 0) {
    throw UsageError(std::to_string(in_flight) +
                     " works are in flight on this rank; MPI's own allreduce needs that there are "
                     "none: wait for them first, or take another algorithm");
  }
  return submit_as(next_key(call, *group), call, description, data, std::move(stand_in));
}

std::shared_ptr<Work> Submissions::submit_as(const Key& key, const Call& call,
                                             const Description& description, void* data,
                                             std::shared_ptr<const void> memory) {
  const SharedGroup& group = call.group ? call.group : parts_.all;
  auto collective = parts_.planning.make(call, description, data, *group);
  parts_.immediate.pass(call, key, *group);
  return submit_begun(key, description, group, std::move(collective), std::move(memory));
}

std::shared_ptr<Work> Submissions::submit_begun(const Key& key, const Description& description,
                                                const SharedGroup& group,
                                                std::unique_ptr<Collective> collective,
                                                std::shared_ptr<const void> memory) {
  auto work = parts_.works.make_keyed(description, key, group);
  work->collective = std::move(collective);
  work->memory = std::move(memory);
  begin(work);
  return work;
}

// The first step hands the first messages to the channel, so that the header can carry one of them.
void Submissions::begin(const std::shared_ptr<Work>& work) {
  parts_.works.begin(work);
  parts_.matching.advance(work->key);
  const Matching::Parked parked = parts_.matching.take(work->key);
  const Failure failure =
      parked.failure ? parked.failure : parts_.membership.failure_in(*work->group);
  if (failure) {
    parts_.works.fail(work, failure);
    return;
  }
  if (parts_.works.step(work)) return;
  // Who has joined learns of the work by its header.
  const bool may_wait = !parts_.joining.may_have_joined();
  work->keyed_channel->announce(may_wait && work->collective->greets_next());
  for (const Matching::Parked::Message& message : parked.messages) {
    if (work->ended()) break;
    inbox_.apply(*work, message.from, message.head, message.description, message.payload.data());
  }
  if (!work->ended()) failures_.check_previous_left(work);
}

std::shared_ptr<Work> Submissions::launch_bucket(int64_t number) {
  const std::shared_ptr<Work> work = parts_.buckets.take_prepared(number);
  parts_.joining.on_launched(*work);
  parts_.matching.advance(work->key);
  parts_.works.begin(work);
  if (const Failure failure = parts_.membership.failure_in(*work->group)) {
    parts_.works.fail(work, failure);
  } else if (!parts_.works.step(work)) {
    failures_.check_previous_left(work);
  }
  return work;
}

Description Submissions::header_of(const Call& call) {
  Description description = describe(call);
  if (call.kind == Kind::kAllreduce) {
    description.algorithm =
        parts_.planning.plan(call, call.group ? *call.group : *parts_.all).algorithm;
  }
  description.inline_bytes = inline_bytes();
  description.joins = parts_.joining.meetings();
  return description;
}

uint32_t Submissions::inline_bytes() const {
  return parts_.works.has_many() ? 0 : static_cast<uint32_t>(parts_.options.inline_bytes);
}

Key Submissions::next_key(const Call& call, const Group& group) {
  const uint64_t what = call.name.empty() ? static_cast<uint64_t>(call.kind) : hash_of(call.name);
  return parts_.matching.next(call.name.empty() ? KeySpace::kUnnamed : KeySpace::kName,
                              what ^ group.id);
}

void Submissions::refuse(const Call& call, const std::string& why) {
  const SharedGroup& group = call.group ? call.group : parts_.all;
  const Key key = next_key(call, *group);
  parts_.immediate.pass(call, key, *group);
  parts_.matching.advance(key);
  parts_.matching.take(key);
  if (group->is_all()) parts_.works.count_refused();
  const Description description = describe(call);
  const std::string label = label_of(key, description, *group);
  const Failure failure{
      "rank " + std::to_string(parts_.rank) + " cannot make " + label + ": " + why,
      FailureKind::kMismatch, parts_.joining.meetings()};
  FlightRecorder& recorder = parts_.works.recorder();
  const int64_t now = parts_.clock.now_ns();
  recorder.end(recorder.begin(key, description, *group, now), now, failure.text);
  parts_.transport->expect_stray_messages();
  for (const int to : group->ranks) {
    if (to != parts_.rank) failures_.send(to, MessageType::kMismatch, key, failure);
  }
}

void Submissions::send_failure(int to, MessageType type, const Key& key, const Failure& why) {
  failures_.send(to, type, key, why);
}

}  // namespace ringdl

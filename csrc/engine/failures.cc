#include "engine/failures.h"

#include <algorithm>

#include "engine/parts.h"

namespace ringdl {
namespace {

int previous_in(const Group& group) {
  return group.ranks[static_cast<size_t>((group.rank + group.size() - 1) % group.size())];
}

const char* cure_of_leaving(const Key& key) {
  return key.space == KeySpace::kBucket
             ? "Have all ranks make the same number of steps, or, if they have different numbers "
               "of batches, call join() after the last one"
             : "Have all ranks make the same calls before they end";
}

}  // namespace

void Failures::on_left(const std::vector<int>& ranks) {
  std::vector<std::shared_ptr<Work>> works;
  for (const auto& [key, work] : parts_.works.in_flight()) {
    const int previous = previous_in(*work->group);
    const bool is_awaited = std::find(ranks.begin(), ranks.end(), previous) != ranks.end();
    if (work->names_no_sender || is_awaited) works.push_back(work);
  }
  for (const auto& work : works) check_previous_left(work);
  parts_.diagnosis.on_left(ranks, parts_.clock.now_ns());
}

void Failures::find_failed_ranks(int64_t now) {
  for (const Membership::Failed& failed : parts_.membership.find_failed(now)) {
    MessageHead head;
    head.type = MessageType::kFailed;
    head.value = static_cast<uint64_t>(failed.rank);
    const std::string_view why = cut_to_fit(failed.why, kMaxPayloadBytes);
    for (int to = 0; to < parts_.size; ++to) {
      if (to == parts_.rank || to == failed.rank || parts_.membership.is_gone(to)) continue;
      parts_.control->send(to, head, nullptr, why.data(), why.size());
    }
    fail_rank(failed);
  }
}

void Failures::fail_rank(const Membership::Failed& failed) {
  if (!parts_.membership.fail(failed)) return;
  parts_.transport->expect_stray_messages();
  std::vector<std::shared_ptr<Work>> works;
  for (const auto& [key, work] : parts_.works.in_flight()) {
    const bool has_message = work->names_no_sender && work->sender >= 0;  // a work of its own
    if (work->group->index_of(failed.rank) >= 0 && !has_message) works.push_back(work);
  }
  for (const auto& work : works) {
    parts_.works.fail(work, parts_.membership.failure_in(*work->group));
  }
  parts_.works.forget_drains(failed.rank);
}

// The key is copied, as the last call ends the work.
void Failures::fail_everywhere(const Work& work, const Failure& why) {
  const Key key = work.key;
  const SharedGroup group = work.group;
  for (const int to : group->ranks) {
    if (to != parts_.rank) send(to, MessageType::kMismatch, key, why);
  }
  send(parts_.rank, MessageType::kMismatch, key, why);
}

void Failures::fail_broken(const WorkTable::Broken& broken) {
  const Work& work = *broken.work;
  if (work.ended()) return;
  fail_everywhere(
      work, {work.label() + " failed on rank " + std::to_string(parts_.rank) + ": " + broken.why,
             broken.kind, work.description.joins});
}

void Failures::send(int to, MessageType type, const Key& key, const Failure& why) {
  const std::string text(cut_to_fit(why.text, kMaxPayloadBytes));
  if (to == parts_.rank) {
    fail(key, {text, why.kind, why.joins}, type == MessageType::kVerdict);
    return;
  }
  MessageHead head;
  head.type = type;
  head.key = key;
  head.flag = static_cast<uint8_t>(why.kind);
  head.value = why.joins;
  parts_.control->send(to, head, nullptr, text.data(), text.size());
}

// A key that all ranks will submit in time fails once they do. One that some rank never meant to
// submit is skipped there, so that all agree on which instance is next; so is one from before all
// ranks joined, which this one has not answered and never will. Only the next one can be skipped:
// instances before it may be in flight elsewhere.
void Failures::fail(const Key& key, const Failure& why, bool skip) {
  // On a bucket's tags, to a rank that never launched it.
  parts_.transport->expect_stray_messages();
  if (const std::shared_ptr<Work> work = parts_.works.find(key)) {
    if (work->sender < 0) parts_.works.fail(work, why);  // else its message writes to the buffer
  } else if (!parts_.matching.is_ahead(key)) {
    return;  // another rank reported the same before
  } else if (key.space == KeySpace::kBucket) {
    parts_.matching.park_failure(key, why);
    parts_.buckets.on_failure(key, why);
  } else if ((skip || why.joins < parts_.joining.meetings()) && parts_.matching.is_next(key)) {
    parts_.matching.advance(key);
    parts_.matching.take(key);
  } else {
    parts_.matching.park_failure(key, why);
    parts_.any_receives.on_header();
    parts_.mailbox.on_header(key);
  }
}

// A rank that has left and is not known to have submitted the work is asked: it may have failed it
// at once, and the reason may still be on its way to this rank.
void Failures::check_previous_left(const std::shared_ptr<Work>& work) {
  const Group& group = *work->group;
  const int previous = previous_in(group);
  if (!parts_.membership.has_left(previous) || work->ended()) return;
  if (work->polled && parts_.works.step(work)) return;
  if (work->keyed_channel) {
    const int member = (group.rank + group.size() - 1) % group.size();
    if (work->keyed_channel->agreed() || work->collective->has_met(member)) return;
  }
  parts_.diagnosis.ask_who_left(work->key, previous, parts_.clock.now_ns());
}

// Not a verdict: ranks that have not reached this key yet fail it when they do.
void Failures::fail_for_left(const Key& key, int left_rank) {
  const std::shared_ptr<Work> work = parts_.works.find(key);
  if (!work) return;
  if (work->names_no_sender) {
    const Failure failure = parts_.any_receives.failure_by_leaving(*work);
    if (failure) fail(key, failure, false);
    return;
  }
  fail_everywhere(
      *work,
      {"rank " + std::to_string(left_rank) + " has shut down without submitting " + work->label() +
           ", for which rank " + std::to_string(parts_.rank) + " waits. " + cure_of_leaving(key),
       FailureKind::kMismatch, work->description.joins});
}

void Failures::check_senders(const Work& work) {
  if (!work.names_no_sender || work.ended() || work.sender >= 0) return;
  Failure failure = parts_.any_receives.failure_by_leaving(work);
  if (!failure) failure = parts_.membership.failure_in(*work.group);
  if (failure) fail(work.key, failure, false);
}

const std::vector<bool>& Failures::left() const { return parts_.membership.left(); }

bool Failures::is_ahead(const Key& key) const {
  return parts_.matching.is_ahead(key) && !parts_.matching.is_known_to_fail(key);
}

SharedGroup Failures::group_in_flight(const Key& key) const {
  const std::shared_ptr<Work> work = parts_.works.find(key);
  return work ? work->group : nullptr;
}

void Failures::send_verdict(int to, const Key& key, const std::string& why) {
  send(to, MessageType::kVerdict, key, {why, FailureKind::kMismatch, parts_.joining.meetings()});
}

}  // namespace ringdl

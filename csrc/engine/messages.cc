// What control messages do: works are matched, compared, and failed on all ranks of their group;
// and what becomes of the works of a rank that has failed.

#include <algorithm>
#include <utility>

#include "engine/engine.h"

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

void Engine::handle(const ControlMessage& message) {
  const MessageHead& head = message.head;
  const std::string text(reinterpret_cast<const char*>(message.payload), head.payload_bytes);
  switch (head.type) {
    case MessageType::kSubmit:
    case MessageType::kData:
    case MessageType::kGrant:
    case MessageType::kClose: {
      if (const std::shared_ptr<Work> work = works_.find(head.key)) {
        apply(*work, message.from, head, message.description, message.payload);
      } else if (matching_.is_ahead(head.key)) {
        matching_.park(message);
        any_receives_.on_header();
      } else if (head.type == MessageType::kGrant) {  // for a work that has failed here
        MessageHead close;
        close.type = MessageType::kClose;
        close.key = head.key;
        close.tag = head.tag;
        control_->send(message.from, close);
      } else if (head.type == MessageType::kClose) {
        works_.on_closed(message.from, head.key, head.sequence);
      }
      break;
    }
    case MessageType::kMismatch:
    case MessageType::kVerdict:
      fail_key(head.key, {text, static_cast<FailureKind>(head.flag), head.value},
               head.type == MessageType::kVerdict);
      break;
    case MessageType::kQuery:
    case MessageType::kCount:
      if (membership_.departures().is_over()) break;
      if (joining_.is_joined()) {
        joining_.put_off({message.from, head, message.description, nullptr});
      } else if (answers_later()) {
        queries_.push_back({message.from, head, message.description, nullptr});
      } else {
        answer_query(message);
      }
      break;
    case MessageType::kAnswer:
      diagnosis_.on_answer(message);
      break;
    case MessageType::kCounted:
      diagnosis_.on_counted(message, clock_.now_ns());
      break;
    case MessageType::kBlocked:
      diagnosis_.on_blocked(message, clock_.now_ns());
      break;
    case MessageType::kJoined:
      joining_.on_joined(message.from, head.value);
      break;
    case MessageType::kLaunched:
      buckets_.on_launched(head.key);
      break;
    case MessageType::kQuiet:
      membership_.departures().on_quiet(message.from);
      break;
    case MessageType::kFailed:
      fail_rank({static_cast<int>(head.value), text});
      break;
    case MessageType::kLeaving:
      on_left(membership_.departures().on_leaving(message, clock_.now_ns()));
      break;
  }
}

void Engine::answer_query(const ControlMessage& message) {
  if (message.head.type == MessageType::kCount) {
    diagnosis_.on_count(message, clock_.now_ns());
  } else {
    diagnosis_.on_query(message);
  }
}

void Engine::on_left(const std::vector<int>& ranks) {
  std::vector<std::shared_ptr<Work>> works;
  for (const auto& [key, work] : works_.in_flight()) {
    const int previous = previous_in(*work->group);
    const bool is_awaited = std::find(ranks.begin(), ranks.end(), previous) != ranks.end();
    if (work->names_no_sender || is_awaited) works.push_back(work);
  }
  for (const auto& work : works) check_previous_left(work);
  diagnosis_.on_left(ranks, clock_.now_ns());
}

void Engine::find_failed_ranks(int64_t now) {
  for (const Membership::Failed& failed : membership_.find_failed(now)) {
    MessageHead head;
    head.type = MessageType::kFailed;
    head.value = static_cast<uint64_t>(failed.rank);
    const std::string_view why = cut_to_fit(failed.why, kMaxPayloadBytes);
    for (int to = 0; to < size_; ++to) {
      if (to == rank_ || to == failed.rank || membership_.is_gone(to)) continue;
      control_->send(to, head, nullptr, why.data(), why.size());
    }
    fail_rank(failed);
  }
}

void Engine::fail_rank(const Membership::Failed& failed) {
  if (!membership_.fail(failed)) return;
  transport_->expect_stray_messages();
  std::vector<std::shared_ptr<Work>> works;
  for (const auto& [key, work] : works_.in_flight()) {
    const bool has_message = work->names_no_sender && work->sender >= 0;  // a work of its own
    if (work->group->index_of(failed.rank) >= 0 && !has_message) works.push_back(work);
  }
  for (const auto& work : works) works_.fail(work, membership_.failure_in(*work->group));
  works_.forget_drains(failed.rank);
}

void Engine::apply(Work& work, int from, const MessageHead& head, const Description& description,
                   const std::byte* payload) {
  const int member = work.group->index_of(from);
  if (!work.keyed_channel || member < 0) return;
  switch (head.type) {
    case MessageType::kSubmit:
      compare(work, from, description);
      if (!work.ended() && head.flag != 0) {
        work.keyed_channel->deliver(member, 0, payload, head.payload_bytes);
      }
      break;
    case MessageType::kData:
      work.keyed_channel->deliver(member, head.sequence, payload, head.payload_bytes);
      break;
    case MessageType::kGrant:
      work.keyed_channel->grant(member, head.tag);
      break;
    case MessageType::kClose:
      work.keyed_channel->close(member, head.sequence);
      break;
    default:
      break;
  }
}

void Engine::compare(Work& work, int from, const Description& theirs) {
  const std::string differs = difference(theirs, from, work.description, rank_);
  if (differs.empty()) {
    work.keyed_channel->agree(work.group->index_of(from), theirs);
    return;
  }
  fail_everywhere(
      work, {"ranks disagree on " + work.label() + ": " + differs + ". Pass the same on all ranks",
             FailureKind::kMismatch, work.description.joins});
}

void Engine::refuse(const Call& call, const std::string& why) {
  const SharedGroup& group = call.group ? call.group : all_;
  const Key key = next_key(call, *group);
  immediate_.pass(call, key, *group);
  matching_.advance(key);
  matching_.take(key);
  if (group->is_all()) works_.count_refused();
  const std::string label = label_of(key, describe(call), *group);
  const Failure failure{"rank " + std::to_string(rank_) + " cannot make " + label + ": " + why,
                        FailureKind::kMismatch, joining_.meetings()};
  transport_->expect_stray_messages();
  for (const int to : group->ranks) {
    if (to != rank_) send_failure(to, MessageType::kMismatch, key, failure);
  }
  poll();
}

// The key is copied, as the last call ends the work.
void Engine::fail_everywhere(const Work& work, const Failure& why) {
  const Key key = work.key;
  const SharedGroup group = work.group;
  for (const int to : group->ranks) {
    if (to != rank_) send_failure(to, MessageType::kMismatch, key, why);
  }
  send_failure(rank_, MessageType::kMismatch, key, why);
}

void Engine::send_failure(int to, MessageType type, const Key& key, const Failure& why) {
  const std::string text(cut_to_fit(why.text, kMaxPayloadBytes));
  if (to == rank_) {
    fail_key(key, {text, why.kind, why.joins}, type == MessageType::kVerdict);
    return;
  }
  MessageHead head;
  head.type = type;
  head.key = key;
  head.flag = static_cast<uint8_t>(why.kind);
  head.value = why.joins;
  control_->send(to, head, nullptr, text.data(), text.size());
}

// A key that all ranks will submit in time fails once they do. One that some rank never meant to
// submit is skipped there, so that all agree on which instance is next; so is one from before all
// ranks joined, which this one has not answered and never will. Only the next one can be skipped:
// instances before it may be in flight elsewhere.
void Engine::fail_key(const Key& key, const Failure& why, bool skip) {
  transport_->expect_stray_messages();  // on a bucket's tags, to a rank that never launched it
  if (const std::shared_ptr<Work> work = works_.find(key)) {
    if (work->sender < 0) works_.fail(work, why);  // else its message writes to the buffer
  } else if (!matching_.is_ahead(key)) {
    return;  // another rank reported the same before
  } else if (key.space == KeySpace::kBucket) {
    matching_.park_failure(key, why);
    buckets_.on_failure(key, why);
  } else if ((skip || why.joins < joining_.meetings()) && matching_.is_next(key)) {
    matching_.advance(key);
    matching_.take(key);
  } else {
    matching_.park_failure(key, why);
  }
}

// A rank that has left and is not known to have submitted the work is asked: it may have failed it
// at once, and the reason may still be on its way to this rank.
void Engine::check_previous_left(const std::shared_ptr<Work>& work) {
  const Group& group = *work->group;
  const int previous = previous_in(group);
  if (!membership_.has_left(previous) || work->ended()) return;
  if (work->polled && works_.step(work)) return;
  if (work->keyed_channel) {
    const int member = (group.rank + group.size() - 1) % group.size();
    if (work->keyed_channel->agreed() || work->collective->has_met(member)) return;
  }
  diagnosis_.ask_who_left(work->key, previous, clock_.now_ns());
}

// Not a verdict: ranks that have not reached this key yet fail it when they do.
void Engine::fail_for_left(const Key& key, int left_rank) {
  const std::shared_ptr<Work> work = works_.find(key);
  if (!work) return;
  if (work->names_no_sender) {
    const Failure failure = any_receives_.failure_by_leaving(*work);
    if (failure) fail_key(key, failure, false);
    return;
  }
  fail_everywhere(
      *work,
      {"rank " + std::to_string(left_rank) + " has shut down without submitting " + work->label() +
           ", for which rank " + std::to_string(rank_) + " waits. " + cure_of_leaving(key),
       FailureKind::kMismatch, work->description.joins});
}

bool Engine::is_ahead(const Key& key) const {
  return matching_.is_ahead(key) && !matching_.is_known_to_fail(key);
}

SharedGroup Engine::group_in_flight(const Key& key) const {
  const std::shared_ptr<Work> work = works_.find(key);
  return work ? work->group : nullptr;
}

void Engine::send_verdict(int to, const Key& key, const std::string& why) {
  send_failure(to, MessageType::kVerdict, key, {why, FailureKind::kMismatch, joining_.meetings()});
}

}  // namespace ringdl

#include "engine/inbox.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/failures.h"
#include "engine/parts.h"

namespace ringdl {

int Inbox::poll() {
  const int messages = parts_.transport->poll();
  quiet_polls_ = messages > 0 ? 0 : std::min(quiet_polls_ + 1, kQuietPolls);
  return messages;
}

void Inbox::handle(const ControlMessage& message) {
  const MessageHead& head = message.head;
  const std::string text(reinterpret_cast<const char*>(message.payload), head.payload_bytes);
  switch (head.type) {
    case MessageType::kSubmit:
    case MessageType::kData:
    case MessageType::kGrant:
    case MessageType::kClose: {
      if (const std::shared_ptr<Work> work = parts_.works.find(head.key)) {
        apply(*work, message.from, head, message.description, message.payload);
      } else if (parts_.matching.is_ahead(head.key)) {
        parts_.matching.park(message);
        parts_.any_receives.on_header();
        parts_.mailbox.on_header(head.key);
      } else if (head.type == MessageType::kGrant) {  // for a work that has failed here
        MessageHead close;
        close.type = MessageType::kClose;
        close.key = head.key;
        close.tag = head.tag;
        parts_.control->send(message.from, close);
      } else if (head.type == MessageType::kClose) {
        parts_.works.on_closed(message.from, head.key, head.sequence, head.value);
      }
      break;
    }
    case MessageType::kMismatch:
    case MessageType::kVerdict:
      failures_.fail(head.key, {text, static_cast<FailureKind>(head.flag), head.value},
                     head.type == MessageType::kVerdict);
      break;
    case MessageType::kQuery:
    case MessageType::kCount:
      if (parts_.membership.departures().is_over()) break;
      if (parts_.joining.is_joined()) {
        parts_.joining.put_off({message.from, head, message.description, nullptr});
      } else if (answers_later()) {
        queries_.push_back({message.from, head, message.description, nullptr});
      } else {
        answer(message);
      }
      break;
    case MessageType::kAnswer:
      parts_.diagnosis.on_answer(message);
      break;
    case MessageType::kCounted:
      parts_.diagnosis.on_counted(message, parts_.clock.now_ns());
      break;
    case MessageType::kBlocked:
      parts_.diagnosis.on_blocked(message, parts_.clock.now_ns());
      break;
    case MessageType::kJoined:
      parts_.joining.on_joined(message.from, head.value);
      break;
    case MessageType::kLaunched:
      parts_.buckets.on_launched(head.key);
      break;
    case MessageType::kQuiet:
      parts_.membership.departures().on_quiet(message.from);
      break;
    case MessageType::kFailed:
      failures_.fail_rank({static_cast<int>(head.value), text});
      break;
    case MessageType::kLeaving:
      failures_.on_left(parts_.membership.departures().on_leaving(message, parts_.clock.now_ns()));
      break;
  }
}

void Inbox::answer(const ControlMessage& message) {
  if (message.head.type == MessageType::kCount) {
    parts_.diagnosis.on_count(message, parts_.clock.now_ns());
  } else {
    parts_.diagnosis.on_query(message);
  }
}

void Inbox::apply(Work& work, int from, const MessageHead& head, const Description& description,
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
      work.keyed_channel->close(member, head.sequence, head.value);
      break;
    default:
      break;
  }
}

void Inbox::compare(Work& work, int from, const Description& theirs) {
  const std::string differs = difference(theirs, from, work.description, parts_.rank);
  if (differs.empty()) {
    work.keyed_channel->agree(work.group->index_of(from), theirs);
    return;
  }
  failures_.fail_everywhere(
      work, {"ranks disagree on " + work.label() + ": " + differs + ". Pass the same on all ranks",
             FailureKind::kMismatch, work.description.joins});
}

bool Inbox::answers_later() const {
  return parts_.mailbox.has_new() || (!parts_.any_receives.is_empty() && !is_quiet());
}

void Inbox::answer_put_off() {
  if (is_quiet()) {
    for (const ControlMessage& query : parts_.joining.take_queries()) answer(query);
  }
  if (!queries_.empty() && !answers_later()) {
    for (const ControlMessage& query : std::exchange(queries_, {})) answer(query);
  }
}

}  // namespace ringdl

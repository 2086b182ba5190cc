#include "engine/channels.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringdl {

KeyedChannel::KeyedChannel(ChannelContext context, Key key, const Description& description,
                           std::function<void()> touch)
    : context_(std::move(context)),
      key_(key),
      description_(description),
      touch_(std::move(touch)) {}

MessageHead KeyedChannel::head(MessageType type) const {
  MessageHead head;
  head.type = type;
  head.key = key_;
  return head;
}

// Messages to the next rank wait for announce(), whatever the order of the first messages.
void KeyedChannel::send(int to, const void* data, size_t bytes) {
  Edge& edge = out_[to];
  edge.messages.add(const_cast<void*>(data), bytes);
  if (edge.greeted) {
    start_send(to, edge, edge.messages.next() - 1);
  } else if (to != next() || announced_) {
    greet(to, edge);
  }
}

void KeyedChannel::announce(bool can_wait) {
  announced_ = true;
  Edge& edge = out_[next()];
  if (!edge.greeted && (!can_wait || edge.messages.next() > 0)) greet(next(), edge);
}

void KeyedChannel::greet(int to, Edge& edge) {
  MessageHead submit = head(MessageType::kSubmit);
  int64_t number = 0;
  const int64_t end = edge.messages.next();
  if (number < end && edge.messages[0].bytes <= description_.inline_bytes) {
    submit.flag = 1;
    MessageSequence::Message& first = edge.messages[number++];
    context_.control.send(context_.rank_of(to), submit, &description_, first.data, first.bytes);
    edge.messages.end(first);
  } else {
    context_.control.send(context_.rank_of(to), submit, &description_);
  }
  edge.greeted = true;
  for (; number < end; ++number) start_send(to, edge, number);
}

void KeyedChannel::start_send(int to, Edge& edge, int64_t number) {
  MessageSequence::Message& message = edge.messages[number];
  if (message.bytes <= description_.inline_bytes) {
    MessageHead data = head(MessageType::kData);
    data.sequence = static_cast<uint32_t>(number);
    context_.control.send(context_.rank_of(to), data, nullptr, message.data, message.bytes);
    edge.messages.end(message);
  } else if (edge.tag >= 0) {
    message.ticket =
        context_.transport.send(context_.rank_of(to), edge.tag, message.data, message.bytes, *this);
    message.started = true;
    ++edge.tagged;
    edge.longest_bytes = std::max(edge.longest_bytes, message.bytes);
    ++context_.counters.data_messages_sent;
    context_.counters.data_bytes_sent += static_cast<int64_t>(message.bytes);
  }
}

void KeyedChannel::agree(int from, const Description& theirs) {
  Edge& edge = in_[from];
  edge.greeted = true;
  edge.inline_bytes = theirs.inline_bytes;
  if (from == previous()) agreed_ = true;
  route_all(from, edge);
  touch_();
}

void KeyedChannel::receive(int from, void* data, size_t bytes) {
  Edge& edge = in_[from];
  edge.messages.add(data, bytes);
  route(from, edge, edge.messages.next() - 1);
}

// Decides how message `number` arrives, once that can be known.
void KeyedChannel::route(int from, Edge& edge, int64_t number) {
  MessageSequence::Message& message = edge.messages[number];
  if (message.started || message.ended || !edge.greeted) return;
  if (message.bytes <= edge.inline_bytes) {
    const auto parked = edge.parked.find(number);
    if (parked == edge.parked.end()) return;
    if (message.bytes > 0) std::memcpy(message.data, parked->second.data(), message.bytes);
    edge.parked.erase(parked);
    edge.messages.end(message);
    return;
  }
  const int rank = context_.rank_of(from);
  if (edge.tag < 0) {
    edge.tag = context_.tags.of(rank).take();
    if (edge.tag < 0) return;
    MessageHead grant = head(MessageType::kGrant);
    grant.tag = edge.tag;
    context_.control.send(rank, grant);
    ++context_.counters.grants_sent;
  }
  message.ticket = context_.transport.receive(rank, edge.tag, message.data, message.bytes, *this);
  message.started = true;
}

void KeyedChannel::route_all(int from, Edge& edge) {
  for (int64_t number = edge.messages.first(); number < edge.messages.next(); ++number) {
    route(from, edge, number);
    if (number < edge.messages.first()) number = edge.messages.first() - 1;
  }
}

void KeyedChannel::route_waiting() {
  for (auto& [from, edge] : in_) route_all(from, edge);
}

void KeyedChannel::deliver(int from, int64_t sequence, const std::byte* payload, size_t bytes) {
  Edge& edge = in_[from];
  edge.parked[sequence].assign(payload, payload + bytes);
  if (sequence < edge.messages.next()) route(from, edge, sequence);
  touch_();
}

void KeyedChannel::grant(int from, int tag) {
  Edge& edge = out_[from];
  edge.tag = tag;
  for (int64_t number = edge.messages.first(); number < edge.messages.next(); ++number) {
    if (!edge.messages[number].started && !edge.messages[number].ended)
      start_send(from, edge, number);
  }
}

void KeyedChannel::close(int from, int64_t sent, size_t longest) {
  in_[from].closed = sent;
  in_[from].longest_bytes = longest;
}

void KeyedChannel::finish() {
  for (auto& [from, edge] : in_) {
    if (edge.tag < 0) continue;
    context_.tags.of(context_.rank_of(from)).give_back(std::exchange(edge.tag, -1));
  }
}

// Withdraws from the back: messages that arrive meanwhile match the first receives, their own.
std::vector<KeyedChannel::OpenTag> KeyedChannel::abort() {
  std::vector<OpenTag> open;
  for (auto& [from, edge] : in_) {
    int64_t received = edge.tagged;
    auto& open_messages = edge.messages.open();
    for (auto message = open_messages.rbegin(); message != open_messages.rend(); ++message) {
      if (!message->started || message->ended) continue;
      if (!context_.transport.withdraw(message->ticket)) ++received;
      message->ended = true;
    }
    if (edge.tag < 0) continue;
    open.push_back({context_.rank_of(from), edge.tag, received, edge.closed, edge.longest_bytes});
  }
  in_.clear();
  for (auto& [to, edge] : out_) {
    if (edge.tag < 0) continue;
    MessageHead close = head(MessageType::kClose);
    close.tag = edge.tag;
    close.sequence = static_cast<uint32_t>(edge.tagged);
    close.value = edge.longest_bytes;
    context_.control.send(context_.rank_of(to), close);
  }
  return open;
}

bool KeyedChannel::idle() const {
  for (const auto& [to, edge] : out_) {
    for (const MessageSequence::Message& message : edge.messages.open()) {
      if (message.started && !message.ended) return false;
    }
  }
  return true;
}

int64_t KeyedChannel::sent(int to) const {
  const auto edge = out_.find(to);
  return edge == out_.end() ? 0 : edge->second.messages.first();
}

int64_t KeyedChannel::received(int from) const {
  const auto edge = in_.find(from);
  return edge == in_.end() ? 0 : edge->second.messages.first();
}

void KeyedChannel::ended(Ticket ticket) {
  for (auto& [from, edge] : in_) {
    if (MessageSequence::Message* message = edge.messages.find(ticket)) {
      ++edge.tagged;
      edge.messages.end(*message);
      touch_();
      return;
    }
  }
  for (auto& [to, edge] : out_) {
    if (MessageSequence::Message* message = edge.messages.find(ticket)) {
      edge.messages.end(*message);
      touch_();
      return;
    }
  }
}

BucketChannel::BucketChannel(ChannelContext context, int tag, std::function<void()> touch)
    : context_(std::move(context)), tag_(tag), touch_(std::move(touch)) {}

void BucketChannel::send(int to, const void* data, size_t bytes) {
  MessageSequence::Message& message = out_.of(to).add(const_cast<void*>(data), bytes);
  message.ticket = context_.transport.send(context_.rank_of(to), tag_, data, bytes, *this);
  message.started = true;
  ++context_.counters.data_messages_sent;
  context_.counters.data_bytes_sent += static_cast<int64_t>(bytes);
}

void BucketChannel::receive(int from, void* data, size_t bytes) {
  MessageSequence::Message& message = in_.of(from).add(data, bytes);
  message.ticket = context_.transport.receive(context_.rank_of(from), tag_, data, bytes, *this);
  message.started = true;
}

void BucketChannel::abort() {
  in_.any([this](MessageSequence& messages) {
    for (auto message = messages.open().rbegin(); message != messages.open().rend(); ++message) {
      if (!message->ended) context_.transport.withdraw(message->ticket);
      message->ended = true;
    }
    return false;
  });
}

void BucketChannel::ended(Ticket ticket) {
  const auto end = [ticket](MessageSequence& messages) {
    MessageSequence::Message* const message = messages.find(ticket);
    if (message != nullptr) messages.end(*message);
    return message != nullptr;
  };
  if (in_.any(end) || out_.any(end)) touch_();
}

}  // namespace ringdl

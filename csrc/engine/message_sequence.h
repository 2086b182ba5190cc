#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>

#include "transport/transport.h"

namespace ringdl {

/// The messages of one work in one direction between two ranks, numbered from 0. Remembers those
/// that have not ended and counts the others; messages may end in any order.
class MessageSequence {
 public:
  struct Message {
    void* data = nullptr;  // only read if the stream sends
    size_t bytes = 0;
    bool started = false;  // handed to the transport, as `ticket`
    bool ended = false;
    Ticket ticket = 0;
  };

  /// Numbers of the first message that has not ended and of the next one to be added.
  int64_t first() const { return first_; }
  int64_t next() const { return first_ + static_cast<int64_t>(messages_.size()); }

  Message& operator[](int64_t number) { return messages_[static_cast<size_t>(number - first_)]; }

  Message& add(void* data, size_t bytes) {
    messages_.push_back({data, bytes, false, false, 0});
    return messages_.back();
  }

  void end(Message& message) {
    message.ended = true;
    while (!messages_.empty() && messages_.front().ended) {
      messages_.pop_front();
      ++first_;
    }
  }

  /// The message in flight under `ticket`, or null.
  Message* find(Ticket ticket) {
    for (Message& message : messages_) {
      if (message.started && !message.ended && message.ticket == ticket) return &message;
    }
    return nullptr;
  }

  std::deque<Message>& open() { return messages_; }
  const std::deque<Message>& open() const { return messages_; }

 private:
  std::deque<Message> messages_;
  int64_t first_ = 0;
};

/// The same with several ranks. Most often there is one, for which nothing is allocated.
class MessageSequences {
 public:
  MessageSequence& of(int member) {
    if (first_member_ < 0) first_member_ = member;
    return member == first_member_ ? first_ : others_[member];
  }
  /// How many messages have ended, up to the first that has not.
  int64_t ended(int member) const {
    if (member == first_member_) return first_.first();
    const auto its = others_.find(member);
    return its == others_.end() ? 0 : its->second.first();
  }
  /// Whether all have ended.
  bool all_ended() const {
    return first_.open().empty() &&
           std::ranges::all_of(others_, [](const auto& its) { return its.second.open().empty(); });
  }
  /// Calls for the sequence of each rank, until one says true. Returns whether one has.
  template <class Act>
  bool any(const Act& act) {
    return act(first_) ||
           std::ranges::any_of(others_, [&act](auto& its) { return act(its.second); });
  }

 private:
  int first_member_ = -1;
  MessageSequence first_;
  std::map<int, MessageSequence> others_;
};

}  // namespace ringdl

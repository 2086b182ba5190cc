#include "collective/ring_allreduce.h"

#include <algorithm>

namespace ringdl {

// The array is cut into P chunks and each chunk into K segments. Message m of the 2(P-1)K that each
// rank sends to the next one is segment m mod K of step m div K:
//   steps 0 .. P-2    (reduce-scatter) rank r sends its partial sum of chunk r-s-1, receives that
//   of
//                     chunk r-s-2 and adds its own; after them it holds the full sum of chunk r;
//   steps P-1 ..      (allgather) rank r sends chunk r-s', receives chunk r-s'-1, s' = s-(P-1).
// So what message m carries was received as message m-K, in both halves: message m may be sent once
// m-K messages are in place, the first K at once; at most 2 kDepth are on their way.
// Where a received message goes: in the first half into one of kDepth slots, so at most kDepth are
// posted beyond those already added; in the second half straight to its place, once the segment
// that was sent from there, K(P-1) messages before, has left.

RingAllreduce::RingAllreduce(std::byte* data, size_t bytes, Reducer reducer, int rank, int size,
                             size_t segment_bytes)
    : data_(data),
      reducer_(reducer),
      rank_(rank),
      size_(size),
      partition_(bytes, size, segment_bytes),
      messages_(2 * static_cast<int64_t>(size - 1) * partition_.segments()),
      slot_bytes_(partition_.segment_bytes()),
      scratch_(slot_bytes_ * static_cast<size_t>(std::min<int64_t>(kDepth, messages_ / 2))) {}

Span RingAllreduce::sent_span(int64_t message) const {
  const int step = static_cast<int>(message / partition_.segments());
  const int chunk = reduces(message) ? rank_ - step - 1 : rank_ - (step - (size_ - 1));
  return partition_.segment((chunk + size_) % size_,
                            static_cast<int>(message % partition_.segments()));
}

Span RingAllreduce::received_span(int64_t message) const {
  const int step = static_cast<int>(message / partition_.segments());
  const int chunk = reduces(message) ? rank_ - step - 2 : rank_ - (step - (size_ - 1)) - 1;
  return partition_.segment((chunk + 2 * size_) % size_,
                            static_cast<int>(message % partition_.segments()));
}

void RingAllreduce::prepare(Channel& channel) {
  const int previous = (rank_ + size_ - 1) % size_;
  while (posted_ < std::min<int64_t>(kDepth, messages_ / 2)) {
    channel.receive(previous, slot(posted_), received_span(posted_).bytes);
    ++posted_;
  }
}

bool RingAllreduce::post_receives(Channel& channel) {
  const int previous = (rank_ + size_ - 1) % size_;
  const int next = (rank_ + 1) % size_;
  bool moved = false;
  while (posted_ < messages_ && posted_ < taken_ + kDepth) {
    const Span span = received_span(posted_);
    std::byte* target = slot(posted_);
    if (!reduces(posted_)) {
      if (channel.sent(next) <= posted_ - messages_ / 2) break;
      target = data_ + span.begin;
    }
    channel.receive(previous, target, span.bytes);
    ++posted_;
    moved = true;
  }
  return moved;
}

bool RingAllreduce::take_received(Channel& channel) {
  const int64_t received = channel.received((rank_ + size_ - 1) % size_);
  const bool moved = taken_ < received;
  while (taken_ < received) {
    if (reduces(taken_)) {
      const Span span = received_span(taken_);
      const bool last = taken_ + partition_.segments() >= messages_ / 2;
      if (last) {
        reducer_.finish(data_ + span.begin, slot(taken_), span.bytes);
      } else {
        reducer_.combine(data_ + span.begin, slot(taken_), span.bytes);
      }
    }
    ++taken_;
    post_sends(channel);
    post_receives(channel);
  }
  return moved;
}

bool RingAllreduce::post_sends(Channel& channel) {
  const int next = (rank_ + 1) % size_;
  bool moved = false;
  while (launched_ < messages_ && launched_ < taken_ + partition_.segments() &&
         launched_ < channel.sent(next) + 2 * kDepth) {
    const Span span = sent_span(launched_);
    channel.send(next, data_ + span.begin, span.bytes);
    ++launched_;
    moved = true;
  }
  return moved;
}

bool RingAllreduce::step(Channel& channel) {
  if (size_ == 1) return true;
  bool moved = true;
  while (moved) {
    moved = post_receives(channel);
    moved |= post_sends(channel);
    moved |= take_received(channel);
  }
  return taken_ == messages_ && channel.sent((rank_ + 1) % size_) == messages_;
}

std::string RingAllreduce::describe() const {
  return "ring allreduce: " + std::to_string(taken_) + " of " + std::to_string(messages_) +
         " segments received, " + std::to_string(launched_) + " sent";
}

}  // namespace ringdl

#include "collective/messages/ring_reduce_scatter.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringdl {
namespace {

size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }

}  // namespace

// Every chunk is cut into the same number of segments (the last ones of a short chunk may be empty)
// and these into groups of G. One group after the other goes round the ring, G messages in each of
// P-1 steps: in step s rank r sends its partial sum of chunk r-s-1, receives that of chunk r-s-2
// and adds its own part; after the last step it holds the full sum of chunk r.
// A message of step 0 is sent straight from the data. Any other one, m, is message m-G with this
// rank's part added, and leaves from the slot into which that was received; what the last step
// receives goes straight into the output.
// Without groups, all segments of step 0 would leave before the first slot could. If there were
// fewer slots than segments, all slots would be full before that, on all ranks, and the ring would
// stop. With S = G + kDepth slots, message m is received where message m-S was, which has left as
// message m-S+G. So sending, receiving and adding message m wait only for messages with lower
// numbers, here and at the neighbours, and none waits forever.

RingReduceScatter::RingReduceScatter(Executor& executor, const std::byte* data, std::byte* output,
                                     std::vector<Span> chunks, Reducer reducer, int rank,
                                     size_t segment_bytes)
    : executor_(executor),
      data_(data),
      output_(output),
      chunks_(std::move(chunks)),
      reducer_(reducer),
      rank_(rank),
      size_(static_cast<int>(chunks_.size())),
      takes_(executor) {
  size_t longest = 1;
  for (const Span& chunk : chunks_) longest = std::max(longest, chunk.bytes);
  const size_t wanted = divide_up(longest, segment_bytes);
  const size_t groups = divide_up(wanted, kGroup);
  const size_t group = divide_up(wanted, groups);
  group_ = static_cast<int64_t>(group);
  segment_bytes_ = divide_up(divide_up(longest, groups * group), 64) * 64;
  messages_ = static_cast<int64_t>(groups * group) * (size_ - 1);
  slots_ = size_ > 2 ? std::min(group_ + kDepth, messages_) : 0;
  scratch_ = Buffer(static_cast<size_t>(slots_) * segment_bytes_);
}

// The segment of `data_` that belongs to `message`, in the chunk `distance_back` ranks back.
Span RingReduceScatter::span(int distance_back, int64_t message) const {
  const Span& chunk = chunks_[static_cast<size_t>((rank_ + 2 * size_ - distance_back) % size_)];
  const int64_t segment = message / (group_ * (size_ - 1)) * group_ + message % group_;
  const size_t end = chunk.begin + chunk.bytes;
  const size_t begin = std::min(chunk.begin + static_cast<size_t>(segment) * segment_bytes_, end);
  return {begin, std::min(segment_bytes_, end - begin)};
}

std::byte* RingReduceScatter::target(int64_t message) {
  if (!is_last_step(message)) return slot(message);
  return output_ + (span(size_, message).begin - chunks_[static_cast<size_t>(rank_)].begin);
}

bool RingReduceScatter::post_receives(Channel& channel) {
  const int previous = (rank_ + size_ - 1) % size_;
  const int next = (rank_ + 1) % size_;
  bool moved = false;
  while (posted_ < messages_ && posted_ < taken_ + kDepth) {
    if (!is_last_step(posted_) && posted_ >= slots_ &&
        channel.sent(next) <= posted_ - slots_ + group_) {
      break;
    }
    channel.receive(previous, target(posted_), span(step_of(posted_) + 2, posted_).bytes);
    ++posted_;
    moved = true;
  }
  return moved;
}

bool RingReduceScatter::post_sends(Channel& channel) {
  const int next = (rank_ + 1) % size_;
  bool moved = false;
  while (launched_ < messages_ && launched_ < channel.sent(next) + 2 * kDepth) {
    const bool own = step_of(launched_) == 0;
    if (!own && launched_ - group_ >= taken_) break;
    const Span part = span(step_of(launched_) + 1, launched_);
    channel.send(next, own ? data_ + part.begin : slot(launched_ - group_), part.bytes);
    ++launched_;
    moved = true;
  }
  return moved;
}

bool RingReduceScatter::take_received(Channel& channel) {
  const int64_t received = channel.received((rank_ + size_ - 1) % size_);
  const int64_t taken_before = std::exchange(taken_, takes_.done());
  bool moved = taken_ > taken_before;
  while (takes_.asked() < received) {
    const int64_t message = takes_.asked();
    const Span own = span(step_of(message) + 2, message);
    const std::byte* const from = data_ + own.begin;
    takes_.add(is_last_step(message) ? executor_.finish(reducer_, target(message), from, own.bytes)
                                     : executor_.combine(reducer_, slot(message), from, own.bytes));
    taken_ = takes_.done();
    post_sends(channel);
    post_receives(channel);
    moved = true;
  }
  return moved;
}

bool RingReduceScatter::step(Channel& channel) {
  if (size_ == 1) {
    if (takes_.asked() == 0) {
      takes_.add(executor_.copy(output_, data_ + chunks_[0].begin, chunks_[0].bytes));
    }
    return takes_.all_done();
  }
  bool moved = true;
  while (moved) {
    moved = post_receives(channel);
    moved |= post_sends(channel);
    moved |= take_received(channel);
  }
  return taken_ == messages_ && channel.sent((rank_ + 1) % size_) == messages_;
}

std::string RingReduceScatter::describe() const {
  return "ring reduce-scatter: " + std::to_string(taken_) + " of " + std::to_string(messages_) +
         " segments received, " + std::to_string(launched_) + " sent";
}

}  // namespace ringdl

#include "collective/messages/ring_allreduce.h"

#include <algorithm>
#include <limits>

namespace ringdl {

// The array is cut into P chunks and each chunk into K segments. Message m of the 2(P-1)K that each
// rank sends to the next one is segment m mod K of step m div K:
//   steps 0 .. P-2    (reduce-scatter) rank r sends its partial sum of chunk r-s-1 and adds what it
//                     receives to that of chunk r-s-2; in the end it holds the sum of chunk r;
//   steps P-1 ..      (allgather) rank r sends chunk r-s', receives chunk r-s'-1, s' = s-(P-1).
// So message m carries what was received as message m-K, in both halves, and may be sent once that
// is in place, the first K at once; at most 2 kDepth are on their way.
// Where a received message goes: in the first half into one of kDepth slots, so at most kDepth are
// posted beyond those already added; in the second half straight to its place, once the segment
// that was sent from there, K(P-1) messages before, has left. With a codec all go into slots, and
// what is sent is packed into one of 2 kDepth others.

RingAllreduce::RingAllreduce(Executor& executor, std::byte* data, size_t bytes, Reducer reducer,
                             int rank, int size, size_t segment_bytes, Codec codec)
    : executor_(executor),
      data_(data),
      reducer_(reducer),
      rank_(rank),
      size_(size),
      partition_(bytes, size, segment_bytes),
      messages_(2 * static_cast<int64_t>(size - 1) * partition_.segments()),
      takes_(executor),
      packs_(executor),
      codec_(codec),
      slot_bytes_(codec.wire_bytes(partition_.segment_bytes())),
      scratch_(slot_bytes_ * static_cast<size_t>(
                                 std::min<int64_t>(kDepth, messages_ / (codec.shrinks() ? 1 : 2)))),
      packed_(codec.shrinks() ? slot_bytes_ * 2 * kDepth : 0),
      unpacked_(codec.shrinks() ? partition_.segment_bytes() : 0) {}

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
    channel.receive(previous, slot(posted_), codec_.wire_bytes(received_span(posted_).bytes));
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
    if (!reduces(posted_) && !codec_.shrinks()) {
      if (channel.sent(next) <= posted_ - messages_ / 2) break;
      target = data_ + span.begin;
    }
    channel.receive(previous, target, codec_.wire_bytes(span.bytes));
    ++posted_;
    moved = true;
  }
  return moved;
}

bool RingAllreduce::take_received(Channel& channel) {
  const int64_t received = channel.received((rank_ + size_ - 1) % size_);
  const int64_t taken_before = std::exchange(taken_, takes_.done());
  bool moved = taken_ > taken_before;
  while (takes_.asked() < received) {
    takes_.add(take(takes_.asked()));
    taken_ = takes_.done();
    post_sends(channel);
    post_receives(channel);
    moved = true;
  }
  return moved;
}

Executor::Ticket RingAllreduce::take(int64_t message) {
  const Span span = received_span(message);
  std::byte* const into = data_ + span.begin;
  const std::byte* from = slot(message);
  if (!reduces(message)) {
    return codec_.shrinks() ? executor_.unpack(codec_, into, from, span.bytes) : Executor::kDone;
  }
  if (codec_.shrinks()) {
    executor_.unpack(codec_, unpacked_.data(), from, span.bytes);
    from = unpacked_.data();
  }
  const bool is_last = message + partition_.segments() >= messages_ / 2;
  if (!is_last) return executor_.combine(reducer_, into, from, span.bytes);
  const Executor::Ticket finished = executor_.finish(reducer_, into, from, span.bytes);
  if (!codec_.shrinks()) return finished;
  executor_.pack(codec_, unpacked_.data(), into, span.bytes);
  return executor_.unpack(codec_, into, unpacked_.data(), span.bytes);
}

bool RingAllreduce::post_sends(Channel& channel) {
  const int next = (rank_ + 1) % size_;
  bool moved = false;
  while (packs_.asked() < messages_ && packs_.asked() < taken_ + partition_.segments() &&
         packs_.asked() < channel.sent(next) + 2 * kDepth) {
    const int64_t message = packs_.asked();
    const Span span = sent_span(message);
    packs_.add(codec_.shrinks()
                   ? executor_.pack(codec_, packed(message), data_ + span.begin, span.bytes)
                   : Executor::kDone);
    launch(channel);
    moved = true;
  }
  return launch(channel) || moved;
}

// Sends what is packed, or needs no packing.
bool RingAllreduce::launch(Channel& channel) {
  const int64_t before = launched_;
  for (; launched_ < packs_.done(); ++launched_) {
    const Span span = sent_span(launched_);
    const std::byte* const from = codec_.shrinks() ? packed(launched_) : data_ + span.begin;
    channel.send((rank_ + 1) % size_, from, codec_.wire_bytes(span.bytes));
  }
  return launched_ > before;
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

constinit const AllreduceAlgorithm kRingAlgorithm = {
    .id = Algorithm::kRing,
    .name = "ring",
    .ranks = "any ranks",
    .can_run = [](const HostLayout&) { return true; },
    .most_bytes = [](size_t) { return std::numeric_limits<size_t>::max(); },
    .effort =
        [](double bytes, const HostLayout& layout) {
          const double ranks = layout.size();
          return Effort{2 * (ranks - 1), 2 * (ranks - 1) / ranks * bytes};
        },
    .inside = {12e-6, 0.4e-9},
    .between = {30e-6, 8e-9},
    .make = [](const AllreduceArguments& its) -> std::unique_ptr<Collective> {
      return std::make_unique<RingAllreduce>(its.executor, its.data, its.bytes, its.reducer,
                                             its.rank, its.size, its.segment_bytes, its.codec);
    }};

}  // namespace ringdl

#include "collective/two_level/hierarchical_allreduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/messages/ring_allreduce.h"
#include "reduce/streaming.h"

namespace ringdl {
namespace {

// Long enough that the ring's first and last steps, in which the link is idle, are negligible (a
// slab takes 8 ms on 1 Gbit/s); short enough that reducing and copying the first and the last slab
// are negligible, too, and that stages stay in the last-level cache. The same on all hosts, with
// stages or without.
constexpr size_t kSlabBytes = 1 << 20;
constexpr int kSlabsInStage = 2;

// Messages among the k-th ranks of all hosts, after those that they have exchanged before.
class LaneChannel final : public Channel {
 public:
  LaneChannel(Channel& channel, const HostLayout& layout, const std::vector<int64_t>& sent_before,
              const std::vector<int64_t>& received_before)
      : channel_(channel),
        layout_(layout),
        sent_before_(sent_before),
        received_before_(received_before) {}

  int rank() const override { return layout_.host; }
  int size() const override { return static_cast<int>(layout_.hosts.size()); }
  void send(int to, const void* data, size_t bytes) override {
    channel_.send(rank_on(to), data, bytes);
  }
  void receive(int from, void* data, size_t bytes) override {
    channel_.receive(rank_on(from), data, bytes);
  }
  int64_t sent(int to) const override {
    return channel_.sent(rank_on(to)) - sent_before_[static_cast<size_t>(to)];
  }
  int64_t received(int from) const override {
    return channel_.received(rank_on(from)) - received_before_[static_cast<size_t>(from)];
  }
  bool agreed() const override { return channel_.agreed(); }

  int rank_on(int host) const {
    return layout_.hosts[static_cast<size_t>(host)][static_cast<size_t>(layout_.local_rank)];
  }

 private:
  Channel& channel_;
  const HostLayout& layout_;
  const std::vector<int64_t>& sent_before_;
  const std::vector<int64_t>& received_before_;
};

}  // namespace

size_t HierarchicalAllreduce::stage_bytes(int lanes) {
  return kSlabsInStage * kSlabBytes * static_cast<size_t>(lanes);
}

HierarchicalAllreduce::HierarchicalAllreduce(Executor& executor, SharedLayout layout,
                                             LocalArrays local, uint64_t instance, size_t bytes,
                                             ReduceMany reduce_many, Reducer reducer,
                                             size_t segment_bytes, Codec codec)
    : executor_(executor),
      layout_(std::move(layout)),
      local_(std::move(local)),
      counters_(local_.shared.counters),
      instance_(instance),
      reduce_many_(reduce_many),
      reducer_(reducer),
      segment_bytes_(segment_bytes),
      codec_(codec),
      lanes_(layout_->lanes()),
      slabs_(bytes, lanes_, kSlabBytes),
      streams_(bytes >= kStreamBytes),
      copies_in_(executor),
      reductions_(executor),
      copies_out_(static_cast<size_t>(lanes_), Operations(executor)),
      sent_before_(layout_->hosts.size(), 0),
      received_before_(layout_->hosts.size(), 0) {}

// Where `local_rank` has a slab of a lane that all ranks of the host see.
std::byte* HierarchicalAllreduce::at(int local_rank, int lane, int slab) const {
  std::byte* const memory = local_.shared.arrays[static_cast<size_t>(local_rank)];
  if (!local_.are_stages) return memory + slabs_.segment(lane, slab).begin;
  return memory + static_cast<size_t>(slab % kSlabsInStage * lanes_ + lane) * kSlabBytes;
}

// The counters of a host count slabs, from one instance to the next:
//   ready(r)    slabs of rank r that the others see, of each lane
//   claimed(k)  slabs of lane k that are final, at its leader
//   copied(r)   slabs of each lane that rank r has and no longer needs
// Without stages, an array belongs to its owner again once all ranks of its host have copied all
// slabs; with stages, the place of a slab is free once all have copied it.
bool HierarchicalAllreduce::step(Channel& channel) {
  if (!local_.are_stages && in_ < slabs_.segments()) arrive();
  if (local_.are_stages && copy_in()) ++moved_;
  if (is_leader()) {
    if (reduce_next()) ++moved_;
    go_round(channel);
  }
  for (int lane = 0; lane < lanes_; ++lane) {
    if (copy_out(lane)) ++moved_;
  }
  if (const int copied = copied_by_this_rank(); copied > notified_copied_) {
    notified_copied_ = copied;
    counters_.copied(layout_->local_rank).store(count(copied), std::memory_order_release);
  }
  return notified_copied_ == slabs_.segments() && all_have_copied(slabs_.segments());
}

void HierarchicalAllreduce::arrive() {
  in_ = slabs_.segments();
  counters_.ready(layout_->local_rank).store(count(in_), std::memory_order_release);
}

bool HierarchicalAllreduce::copy_in() {
  const auto next = static_cast<int>(copies_in_.asked());
  if (next < slabs_.segments() && all_have_copied(next + 1 - kSlabsInStage)) {
    copies_in_.add(copy_slab_in(next));
  }
  const int before = std::exchange(in_, static_cast<int>(copies_in_.done()));
  if (in_ == before) return false;
  counters_.ready(layout_->local_rank).store(count(in_), std::memory_order_release);
  return true;
}

Executor::Ticket HierarchicalAllreduce::copy_slab_in(int slab) {
  Executor::Ticket last = Executor::kDone;
  for (int lane = 0; lane < lanes_; ++lane) {
    const Span span = slabs_.segment(lane, slab);
    last = std::max(last, executor_.copy(at(layout_->local_rank, lane, slab),
                                         local_.own + span.begin, span.bytes));
  }
  return last;
}

bool HierarchicalAllreduce::reduce_next() {
  const auto next = static_cast<int>(reductions_.asked());
  bool all_are_in = next < slabs_.segments();
  for (int rank = 0; rank < layout_->local_size() && all_are_in; ++rank) {
    all_are_in = counters_.ready(rank).load(std::memory_order_acquire) > count(next);
  }
  if (all_are_in) reductions_.add(reduce(next));
  return std::exchange(reduced_, static_cast<int>(reductions_.done())) < reduced_;
}

Executor::Ticket HierarchicalAllreduce::reduce(int slab) {
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < layout_->local_size(); ++rank) {
    sources.push_back(at(rank, layout_->local_rank, slab));
  }
  if (sources.size() == 1) return Executor::kDone;
  std::byte* const own = at(layout_->local_rank, layout_->local_rank, slab);
  return executor_.reduce(reduce_many_, sources, {&own, 1},
                          slabs_.segment(layout_->local_rank, slab).bytes);
}

void HierarchicalAllreduce::go_round(Channel& channel) {
  LaneChannel lane(channel, *layout_, sent_before_, received_before_);
  while (around_ < reduced_) {
    if (!ring_) {
      ring_ = std::make_unique<RingAllreduce>(
          executor_, at(layout_->local_rank, layout_->local_rank, around_),
          slabs_.segment(layout_->local_rank, around_).bytes, reducer_, lane.rank(), lane.size(),
          segment_bytes_, codec_);
    }
    if (!ring_->step(lane)) return;
    ring_.reset();
    for (int host = 0; host < lane.size(); ++host) {
      sent_before_[static_cast<size_t>(host)] = channel.sent(lane.rank_on(host));
      received_before_[static_cast<size_t>(host)] = channel.received(lane.rank_on(host));
    }
    ++around_;
    ++moved_;
    counters_.claimed(layout_->local_rank).store(count(around_), std::memory_order_release);
  }
}

bool HierarchicalAllreduce::copy_out(int lane) {
  Operations& copies = copies_out_[static_cast<size_t>(lane)];
  const auto next = static_cast<int>(copies.asked());
  if (next == slabs_.segments() ||
      counters_.claimed(lane).load(std::memory_order_acquire) <= count(next)) {
    return false;
  }
  const Span slab = slabs_.segment(lane, next);
  const bool is_there = !local_.are_stages && lane == layout_->local_rank;
  copies.add(is_there ? Executor::kDone
                      : executor_.copy(local_.own + slab.begin, at(lane, lane, next), slab.bytes,
                                       streams_));
  return true;
}

int HierarchicalAllreduce::copied_by_this_rank() {
  int64_t least = slabs_.segments();
  for (Operations& copies : copies_out_) least = std::min(least, copies.done());
  return static_cast<int>(least);
}

bool HierarchicalAllreduce::all_have_copied(int slabs) const {
  for (int rank = 0; rank < layout_->local_size() && slabs > 0; ++rank) {
    if (counters_.copied(rank).load(std::memory_order_acquire) < count(slabs)) return false;
  }
  return true;
}

std::string HierarchicalAllreduce::describe() const {
  int here = 0;
  for (int rank = 0; rank < layout_->local_size(); ++rank) {
    here += static_cast<int>(counters_.ready(rank).load() > count(0));
  }
  std::string text = "hierarchical allreduce: " + std::to_string(here) + " of " +
                     std::to_string(layout_->local_size()) + " ranks of this host have arrived";
  if (!is_leader()) return text;
  return text + ", " + std::to_string(around_) + " of " + std::to_string(slabs_.segments()) +
         " slabs have been around the ring";
}

}  // namespace ringdl

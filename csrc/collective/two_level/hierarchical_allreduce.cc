#include "collective/two_level/hierarchical_allreduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/messages/grid_allreduce.h"
#include "collective/messages/ring_allreduce.h"
#include "reduce/streaming.h"

namespace ringdl {
namespace {

// The longest slab. Long enough that the ring's first and last steps, in which the link is idle,
// are negligible (a slab takes 8 ms on 1 Gbit/s); short enough that reducing and copying the first
// and the last slab are negligible, too, and that stages stay in the last-level cache. Of many
// hosts each has at least so much of a slab that its steps do not only wait for latencies, as far
// as stages do not take too much memory. The same on all hosts, with stages or without.
constexpr size_t kSlabBytes = 1 << 20;
constexpr size_t kSlabBytesPerHost = 16 << 10;
constexpr size_t kMostStageBytes = 128 << 20;
constexpr int kSlabsInStage = 2;

// From so many hosts on a lane is a grid: a ring's steps would take longer than its bytes.
constexpr int kLeastGrid = 32;

// What is reduced or copied at once, before the ring is looked at again: an eighth of what a step
// of the ring carries. Each byte of it comes from all ranks of the host, or goes to each lane. With
// much longer ones, links and other hosts wait for them; shorter ones take less time than a poll.
constexpr size_t kLeastPiece = 8 << 10;
constexpr size_t kMostPiece = 64 << 10;

// All are as long, but the last.
size_t slab_bytes(size_t bytes, const HostLayout& layout) {
  const auto lanes = static_cast<size_t>(layout.lanes());
  const size_t longest = std::max(kSlabBytes, std::min(kSlabBytesPerHost * layout.hosts.size(),
                                                       kMostStageBytes / kSlabsInStage / lanes));
  const size_t part = (bytes + lanes - 1) / lanes;
  const size_t slabs = std::max<size_t>((part + longest - 1) / longest, 1);
  return Partition::round_up((part + slabs - 1) / slabs);
}

// The k-th ranks of all hosts, of which this one is the k-th of its own; none if it leads no lane.
std::vector<int> lane_of(const HostLayout& layout) {
  std::vector<int> ranks;
  if (layout.local_rank >= layout.lanes()) return ranks;
  for (const auto& host : layout.hosts) {
    ranks.push_back(host[static_cast<size_t>(layout.local_rank)]);
  }
  return ranks;
}

}  // namespace

int HierarchicalAllreduce::columns_of(int hosts) {
  return hosts < kLeastGrid ? hosts : grid_columns(hosts);
}

size_t HierarchicalAllreduce::stage_bytes(size_t bytes, const HostLayout& layout) {
  return kSlabsInStage * slab_bytes(bytes, layout) * static_cast<size_t>(layout.lanes());
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
      slabs_(bytes, lanes_, slab_bytes(bytes, *layout_)),
      piece_bytes_(Partition::round_up(std::clamp(
          slabs_.segment_bytes() / static_cast<size_t>(columns_of(layout_->host_count())) / 8,
          kLeastPiece, kMostPiece))),
      pieces_(std::max(
          1, static_cast<int>((slabs_.segment_bytes() + piece_bytes_ - 1) / piece_bytes_))),
      streams_(bytes >= kStreamBytes),
      copies_in_(executor),
      reductions_(executor),
      copies_out_(static_cast<size_t>(lanes_), Operations(executor)),
      lane_(lane_of(*layout_), layout_->host) {}

// Where `local_rank` has a slab of a lane that all ranks of the host see.
std::byte* HierarchicalAllreduce::at(int local_rank, int lane, int slab) const {
  std::byte* const memory = local_.shared.arrays[static_cast<size_t>(local_rank)];
  if (!local_.are_stages) return memory + slabs_.segment(lane, slab).begin;
  const auto place = static_cast<size_t>(slab % kSlabsInStage * lanes_ + lane);
  return memory + place * slabs_.segment_bytes();
}

// Where a piece of a slab begins in it.
Span HierarchicalAllreduce::span_of(int piece, int lane, int slab) const {
  const size_t bytes = slabs_.segment(lane, slab).bytes;
  const size_t begin = std::min(static_cast<size_t>(piece) * piece_bytes_, bytes);
  return {begin, std::min(piece_bytes_, bytes - begin)};
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
  const int64_t of_slab = int64_t{pieces_} * lanes_;
  const int64_t next = copies_in_.asked();
  const auto slab = static_cast<int>(next / of_slab);
  if (slab < slabs_.segments() && all_have_copied(slab + 1 - kSlabsInStage)) {
    const auto place = static_cast<int>(next % of_slab);
    copies_in_.add(copy_piece_in(slab, place / pieces_, place % pieces_));
  }
  const int64_t before = std::exchange(copied_in_, copies_in_.done());
  if (copied_in_ == before) return false;
  in_ = static_cast<int>(copied_in_ / of_slab);
  counters_.ready(layout_->local_rank).store(count(in_), std::memory_order_release);
  return true;
}

Executor::Ticket HierarchicalAllreduce::copy_piece_in(int slab, int lane, int piece) {
  const Span its = span_of(piece, lane, slab);
  const std::byte* const own = local_.own + slabs_.segment(lane, slab).begin;
  return executor_.copy(at(layout_->local_rank, lane, slab) + its.begin, own + its.begin,
                        its.bytes);
}

bool HierarchicalAllreduce::reduce_next() {
  const int64_t next = reductions_.asked();
  const auto slab = static_cast<int>(next / pieces_);
  bool all_are_in = slab < slabs_.segments();
  for (int rank = 0; rank < layout_->local_size() && all_are_in; ++rank) {
    all_are_in = counters_.ready(rank).load(std::memory_order_acquire) > count(slab);
  }
  if (all_are_in) reductions_.add(reduce(slab, static_cast<int>(next % pieces_)));
  return std::exchange(reduced_, reductions_.done()) < reduced_;
}

Executor::Ticket HierarchicalAllreduce::reduce(int slab, int piece) {
  if (layout_->local_size() == 1) return Executor::kDone;
  const int lane = layout_->local_rank;
  const Span its = span_of(piece, lane, slab);
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < layout_->local_size(); ++rank) {
    sources.push_back(at(rank, lane, slab) + its.begin);
  }
  std::byte* const own = at(lane, lane, slab) + its.begin;
  return executor_.reduce(reduce_many_, sources, {&own, 1}, its.bytes);
}

std::unique_ptr<Collective> HierarchicalAllreduce::ring_of(int slab) const {
  const int lane = layout_->local_rank;
  const int hosts = layout_->host_count();
  const int columns = columns_of(layout_->host_count());
  std::byte* const data = at(lane, lane, slab);
  const size_t bytes = slabs_.segment(lane, slab).bytes;
  if (columns < hosts && !codec_.shrinks()) {
    // Two of a chunk are enough, as lanes keep the link busy for each other.
    const size_t half = Partition::round_up(bytes / static_cast<size_t>(columns) / 2);
    return std::make_unique<GridAllreduce>(executor_, data, bytes, reducer_, layout_->host, hosts,
                                           columns, std::max(segment_bytes_, half));
  }
  return std::make_unique<RingAllreduce>(executor_, data, bytes, reducer_, layout_->host, hosts,
                                         segment_bytes_, codec_);
}

void HierarchicalAllreduce::go_round(Channel& channel) {
  lane_.use(channel);
  while (around_ < static_cast<int>(reduced_ / pieces_)) {
    if (!ring_) {
      lane_.begin(channel);
      ring_ = ring_of(around_);
    }
    if (!ring_->step(lane_)) return;
    ring_.reset();
    ++around_;
    ++moved_;
    counters_.claimed(layout_->local_rank).store(count(around_), std::memory_order_release);
  }
}

bool HierarchicalAllreduce::copy_out(int lane) {
  Operations& copies = copies_out_[static_cast<size_t>(lane)];
  const int64_t next = copies.asked();
  const auto slab = static_cast<int>(next / pieces_);
  if (slab == slabs_.segments() ||
      counters_.claimed(lane).load(std::memory_order_acquire) <= count(slab)) {
    return false;
  }
  const Span its = span_of(static_cast<int>(next % pieces_), lane, slab);
  std::byte* const own = local_.own + slabs_.segment(lane, slab).begin;
  const bool is_there = !local_.are_stages && lane == layout_->local_rank;
  copies.add(is_there ? Executor::kDone
                      : executor_.copy(own + its.begin, at(lane, lane, slab) + its.begin, its.bytes,
                                       streams_));
  return true;
}

int HierarchicalAllreduce::copied_by_this_rank() {
  int64_t least = int64_t{slabs_.segments()} * pieces_;
  for (Operations& copies : copies_out_) least = std::min(least, copies.done());
  return static_cast<int>(least / pieces_);
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
         " slabs have been around the ring" + (ring_ ? "; " + ring_->describe() : "");
}

}  // namespace ringdl

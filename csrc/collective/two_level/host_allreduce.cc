#include "collective/two_level/host_allreduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/buffer.h"
#include "base/keep_for_good.h"
#include "collective/shared/direct_allreduce.h"
#include "collective/shared/staged_allreduce.h"

namespace ringdl {

HostAllreduce::HostAllreduce(const AllreduceArguments& its)
    : executor_(its.executor),
      window_(its.window),
      ranks_(its.ranks),
      layout_(its.layout),
      data_(its.data),
      bytes_(its.bytes),
      reduce_many_(its.reduce_many),
      reducer_(its.reducer),
      segment_bytes_(its.segment_bytes),
      codec_(its.codec),
      rank_(layout_->local_rank),
      on_host_(layout_->local_ranks(), rank_) {
  find_places();
  if (its.slot_call != nullptr) exchange_.emplace(*its.slot_call, rank_);
}

// Other ranks read the counters once all of their host have announced their arrays: on one
// host that is known here, too; on several, this rank may hear of a failure elsewhere before.
HostAllreduce::~HostAllreduce() {
  if (exchange_) exchange_->finish();
  if (counters_ && size() > 1 && (chosen_ || layout_->hosts.size() > 1)) {
    const SharedCounters counters(counters_.get(), size());
    window_->free_once(std::move(counters_), counters.left(), static_cast<uint64_t>(size()));
  }
  // It has failed, as another host disagrees, and ranks of this one may not know yet.
  if (stage_ && chosen_ && size() > 1) keep_for_a_while(std::move(stage_));
}

bool HostAllreduce::step(Channel& channel) {
  if (!chosen_) {
    if (!meet(channel)) return false;
    choose();
  }
  if (!chosen_->step(channel)) return false;
  if (places_by_messages_ && !send_places(channel)) return false;
  leave();
  return true;
}

Polled HostAllreduce::step_in_memory() {
  if (!chosen_) {
    if (const Polled met = meet_in_slots(); met != Polled::kDone) return met;
    choose();
  }
  if (!in_memory_->step_in_memory()) return Polled::kUnderWay;
  leave();
  return Polled::kDone;
}

void HostAllreduce::leave() {
  stage_.reset();
  shared_.left().fetch_add(1, std::memory_order_release);
}

int64_t HostAllreduce::pieces() const {
  if (chosen_) return 1 + chosen_->pieces();
  return exchange_ ? 0 : -1;
}

void HostAllreduce::find_places() {
  places_.resize(static_cast<size_t>(size()));
  const size_t bytes = SharedCounters::bytes(size());
  if (size() == 1) {
    counters_ = allocate(bytes);
    std::memset(counters_.get(), 0, bytes);
    return;
  }
  Place& own = places_[static_cast<size_t>(rank_)];
  own.array = place_of(data_, bytes_);
  stage_ = window_->allocate_stage(
      layout_->hosts.size() == 1 ? StagedAllreduce::stage_bytes(executor_.grain(), bytes_, size())
                                 : HierarchicalAllreduce::stage_bytes(bytes_, *layout_));
  own.stage = place_of(stage_.get(), 1);
  if (rank_ != 0) return;
  counters_ = window_->allocate_stage(bytes);
  std::memset(counters_.get(), 0, bytes);
  own.counters = place_of(counters_.get(), bytes);
}

bool HostAllreduce::meet(Channel& channel) {
  if (exchange_) {
    const Polled met = meet_in_slots();
    if (met != Polled::kElsewhere) return met == Polled::kDone;
  }
  return meet_by_messages(channel);
}

Polled HostAllreduce::meet_in_slots() {
  const Place& own = places_[static_cast<size_t>(rank_)];
  const Polled met = exchange_->step({reinterpret_cast<const std::byte*>(&own), sizeof(own)});
  if (met == Polled::kElsewhere) exchange_.reset();
  if (met != Polled::kDone) return met;
  for (int other = 0; other < size(); ++other) {
    if (other == rank_) continue;
    std::memcpy(&places_[static_cast<size_t>(other)], exchange_->payload(other), sizeof(Place));
  }
  exchange_->finish();
  return met;
}

bool HostAllreduce::meet_by_messages(Channel& channel) {
  if (!places_by_messages_) {
    places_by_messages_.emplace(cpu_executor(), std::vector<size_t>(places_.size(), sizeof(Place)),
                                rank_, &places_[static_cast<size_t>(rank_)]);
  }
  send_places(channel);
  if (!places_by_messages_->is_complete()) return false;
  for (int other = 0; other < size(); ++other) {
    std::memcpy(&places_[static_cast<size_t>(other)], places_by_messages_->block(other),
                sizeof(Place));
  }
  return true;
}

// Whether all that this rank has told has left.
bool HostAllreduce::send_places(Channel& channel) {
  on_host_.use(channel);
  return places_by_messages_->step(on_host_);
}

void HostAllreduce::choose() {
  shared_ = SharedCounters(size() == 1 ? counters_.get() : at(0, places_[0].counters), size());
  const bool is_direct = size() == 1 || std::all_of(places_.begin(), places_.end(),
                                                    [](auto& place) { return place.array >= 0; });
  std::vector<std::byte*> memory;
  for (int rank = 0; rank < size(); ++rank) {
    const Place& place = places_[static_cast<size_t>(rank)];
    memory.push_back(size() == 1 ? data_ : at(rank, is_direct ? place.array : place.stage));
  }
  if (is_direct) stage_.reset();
  if (layout_->hosts.size() > 1) {
    chosen_ = std::make_unique<HierarchicalAllreduce>(
        executor_, layout_, LocalArrays{{std::move(memory), shared_}, data_, !is_direct}, 0, bytes_,
        reduce_many_, reducer_, segment_bytes_, codec_);
    return;
  }
  std::unique_ptr<InMemory> in_memory;
  if (is_direct) {
    in_memory = std::make_unique<DirectAllreduce>(
        executor_, SharedArrays{std::move(memory), shared_}, 0, bytes_, reduce_many_, rank_);
  } else {
    in_memory =
        std::make_unique<StagedAllreduce>(executor_, std::move(memory), shared_, data_, bytes_,
                                          reduce_many_, rank_, window_->store_trial());
  }
  in_memory_ = in_memory.get();
  chosen_ = std::move(in_memory);
}

int64_t HostAllreduce::place_of(const std::byte* data, size_t bytes) const {
  const auto offset = window_->offset_of(data, bytes);
  return offset ? static_cast<int64_t>(*offset) : -1;
}

std::byte* HostAllreduce::at(int place, int64_t offset) const {
  const int rank = ranks_[static_cast<size_t>(local(place))];
  return window_->at(rank, static_cast<uint64_t>(offset));
}

std::string HostAllreduce::describe() const {
  if (chosen_) return chosen_->describe();
  if (exchange_) return exchange_->describe();
  const int told = places_by_messages_ ? places_by_messages_->blocks_here() : 0;
  return "allreduce on one host: " + std::to_string(told) + " of " + std::to_string(size()) +
         " ranks have announced their arrays";
}

namespace {

std::unique_ptr<Collective> make(const AllreduceArguments& its) {
  if (its.agreed == nullptr) return std::make_unique<HostAllreduce>(its);
  if (its.layout->host_count() == 1) {
    return std::make_unique<DirectAllreduce>(its.executor, *its.agreed, its.instance, its.bytes,
                                             its.reduce_many, its.rank);
  }
  return std::make_unique<HierarchicalAllreduce>(
      its.executor, its.layout, LocalArrays{*its.agreed, its.data, false}, its.instance, its.bytes,
      its.reduce_many, its.reducer, its.segment_bytes, its.codec);
}

}  // namespace

// Direct where all arrays lie in shared memory, else staged: that is known once ranks have met.
constinit const AllreduceAlgorithm kDirectAlgorithm = {
    .id = Algorithm::kDirect,
    .name = "direct",
    .ranks = "ranks that all share memory",
    .uses_agreed_memory = true,
    .can_run =
        [](const HostLayout& layout) { return layout.host_count() == 1 && layout.size() > 1; },
    .most_bytes = [](size_t) { return std::numeric_limits<size_t>::max(); },
    .effort =
        [](double bytes, const HostLayout& layout) {  // rounds to tell where arrays are
          return Effort{
              static_cast<double>(std::bit_width(static_cast<unsigned>(layout.size() - 1))), bytes};
        },
    .inside = {12e-6, 0.04e-9},
    .between = {},
    .make = make};

constinit const AllreduceAlgorithm kHierarchicalAlgorithm = {
    .id = Algorithm::kHierarchical,
    .name = "hierarchical",
    .ranks = "several hosts with ranks that share memory",
    .uses_agreed_memory = true,
    .can_run =
        [](const HostLayout& layout) {
          return layout.host_count() > 1 && layout.host_count() < layout.size();
        },
    .most_bytes = [](size_t) { return std::numeric_limits<size_t>::max(); },
    .effort =
        [](double bytes, const HostLayout& layout) {
          const int hosts = layout.host_count();
          const int columns = HierarchicalAllreduce::columns_of(hosts);
          const int steps = 2 * (columns - 1 + hosts / columns - 1);
          return Effort{1.0 + steps, 2.0 * (hosts - 1) / hosts * bytes};
        },
    .inside = {},
    .between = {40e-6, 8e-9},
    .make = make};

}  // namespace ringdl

#include "collective/device/device_allreduce.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "collective/shared/direct_allreduce.h"
#include "collective/shared/staged_allreduce.h"

namespace ringdl {
namespace {

std::vector<int> numbers(size_t count) {
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

DeviceAllreduce::DeviceAllreduce(const AllreduceArguments& its, DeviceExecutors& devices,
                                 int device, bool can_reduce, MayBegin may_begin, Fallback fallback)
    : executor_(its.executor),
      devices_(devices),
      device_(device),
      can_reduce_(can_reduce),
      may_begin_(std::move(may_begin)),
      fallback_(std::move(fallback)),
      window_(its.window),
      ranks_(its.ranks),
      data_(its.data),
      bytes_(its.bytes),
      reduce_many_(its.reduce_many),
      rank_(its.rank),
      messages_(numbers(ranks_.size()), rank_) {
  Array own;
  own.place = devices_.place_of(device_, data_, bytes_);
  if (rank_ == 0) {
    const size_t bytes = SharedCounters::bytes(size());
    counters_ = window_->allocate_stage(bytes);
    std::memset(counters_.get(), 0, bytes);
    own.counters = static_cast<int64_t>(*window_->offset_of(counters_.get(), bytes));
  }
  tell(own);
}

// Other ranks use the counters once they have met, which this one may not have seen yet; and its
// stage as long as they have not left.
DeviceAllreduce::~DeviceAllreduce() {
  chosen_.reset();  // which waits for the device
  if (shared_) shared_.left().fetch_add(1, std::memory_order_release);
  if (stage_ && !is_done_) devices_.keep(std::move(stage_));
  if (rank_ != 0) return;
  const SharedCounters counters(counters_.get(), size());
  window_->free_once(std::move(counters_), counters.left(), static_cast<uint64_t>(size()));
}

template <class Told>
void DeviceAllreduce::tell(const Told& own) {
  exchange_.emplace(cpu_executor(), std::vector<size_t>(ranks_.size(), sizeof(own)), rank_, &own);
}

template <class Told>
std::vector<Told> DeviceAllreduce::told() const {
  std::vector<Told> all(ranks_.size());
  for (int rank = 0; rank < size(); ++rank) {
    std::memcpy(&all[static_cast<size_t>(rank)], exchange_->block(rank), sizeof(Told));
  }
  return all;
}

bool DeviceAllreduce::step(Channel& channel) {
  if (!chosen_ && !(meet(channel) && reach(channel) && choose())) return false;
  may_touch_ = may_touch_ || may_begin_();
  is_done_ = may_touch_ && chosen_->step(channel);
  return is_done_;
}

// Ranks tell where their arrays are. If some are not reached by others, all take stages.
bool DeviceAllreduce::meet(Channel& channel) {
  if (shared_) return true;
  if (!exchange_->step(channel)) return false;
  const auto arrays = told<Array>();
  const auto counters = static_cast<uint64_t>(arrays[0].counters);
  shared_ = SharedCounters(window_->at(ranks_[0], counters), size());
  are_direct_ = std::ranges::all_of(arrays, [](const Array& its) { return bool(its.place); });
  if (are_direct_) {
    for (const Array& its : arrays) reached_.push_back(devices_.reached(device_, its.place));
    return true;
  }
  const size_t bytes = StagedAllreduce::stage_bytes(executor_.grain(), bytes_, size());
  try {
    stage_ = devices_.device_stage(device_, bytes);
    tell(devices_.place_of(device_, stage_.get(), bytes));
  } catch (const OutOfMemory&) {  // of the device; by way of the CPU's memory all can
    tell(DevicePlace());
  }
  messages_.begin(channel);
  return true;
}

// Each rank says in the counters whether it reaches all.
bool DeviceAllreduce::reach(Channel& channel) {
  if (has_told_) return true;
  if (!are_direct_) {
    messages_.use(channel);
    if (!exchange_->step(messages_)) return false;
    for (const DevicePlace& its : told<DevicePlace>()) {
      reached_.push_back(devices_.reached(device_, its));
    }
  }
  const bool reaches_all = can_reduce_ && std::ranges::find(reached_, nullptr) == reached_.end();
  shared_.copied(rank_).store(reaches_all ? kReaches : kDoesNotReach, std::memory_order_release);
  has_told_ = true;
  return true;
}

bool DeviceAllreduce::choose() {
  bool all_reach = true;
  for (int rank = 0; rank < size(); ++rank) {
    const uint64_t found = shared_.copied(rank).load(std::memory_order_acquire);
    if (found == 0) return false;
    all_reach = all_reach && found == kReaches;
  }
  if (!all_reach) {
    chosen_ = fallback_();
  } else if (are_direct_) {
    chosen_ = std::make_unique<DirectAllreduce>(executor_, SharedArrays{reached_, shared_}, 0,
                                                bytes_, reduce_many_, rank_);
  } else {
    chosen_ = std::make_unique<StagedAllreduce>(executor_, reached_, shared_, data_, bytes_,
                                                reduce_many_, rank_, window_->store_trial());
  }
  return true;
}

// Counters and the device move without messages.
int64_t DeviceAllreduce::pieces() const {
  if (chosen_) return std::max<int64_t>(chosen_->pieces(), 0);
  return has_told_ ? 0 : -1;
}

std::string DeviceAllreduce::describe() const {
  if (chosen_) return chosen_->describe();
  return "allreduce on devices: " + std::to_string(exchange_->blocks_here()) + " of " +
         std::to_string(size()) + " ranks have said where their " +
         (shared_ ? "stages" : "arrays") + " are";
}

}  // namespace ringdl

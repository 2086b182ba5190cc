#include "engine/bucket_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/buffer.h"

namespace ringdl {

BucketMemory::BucketMemory(Driver& driver, const BucketPlan& plan, SharedGroup group)
    : group_(std::move(group)),
      layout_(driver.layout_of(*group_)),
      shares_(layout_->hosts.size() < group_->ranks.size()),
      window_(shares_ && layout_->local_size() > 1 ? driver.window() : nullptr),
      storage_(std::make_shared<BucketStorage>(
          plan, [&](size_t bytes) { return window_ ? driver.allocate(bytes) : allocate(bytes); })),
      counters_(plan.buckets.size()) {
  if (!shares_) return;
  const size_t bytes = SharedCounters::bytes(layout_->local_size());
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    places_.push_back(place_of(storage_->bucket(static_cast<int>(i))));
    places_.push_back(-1);
    if (layout_->local_rank != 0) continue;
    own_counters_.push_back(window_ ? window_->allocate_stage(bytes) : allocate(bytes));
    std::memset(own_counters_.back().get(), 0, bytes);
    places_.back() = place_of(own_counters_.back().get());
  }
}

// Other members may still read counters that were announced to them and then not used.
BucketMemory::~BucketMemory() {
  if (is_connected_ || !window_) return;
  for (auto& memory : own_counters_) {
    const SharedCounters own(memory.get(), layout_->local_size());
    window_->free_once(std::move(memory), own.left(), std::numeric_limits<uint64_t>::max());
  }
}

int64_t BucketMemory::place_of(const std::byte* data) const {
  const auto offset = window_ ? window_->offset_of(data, 1) : std::nullopt;
  return offset ? static_cast<int64_t>(*offset) : -1;
}

std::optional<SharedArrays> BucketMemory::connect(size_t number, const Places& places) {
  is_connected_ = true;
  if (!shares_ || !is_reached(number, places)) return std::nullopt;
  const auto at = [&](int member, size_t place) {
    const auto index = static_cast<size_t>(member);
    return window_->at(group_->ranks[index], static_cast<uint64_t>(places[index][place]));
  };
  SharedArrays shared;
  if (window_) {
    for (const int member : layout_->local_ranks()) shared.arrays.push_back(at(member, 2 * number));
  } else {
    shared.arrays.push_back(storage_->bucket(static_cast<int>(number)));
  }
  shared.counters = SharedCounters(
      window_ ? at(layout_->local_ranks()[0], 2 * number + 1) : own_counters_[number].get(),
      layout_->local_size());
  counters_[number] = shared.counters;
  return shared;
}

bool BucketMemory::is_reached(size_t number, const Places& places) const {
  return std::ranges::all_of(layout_->hosts, [&](const std::vector<int>& members) {
    return members.size() == 1 || std::ranges::all_of(members, [&](int member) {
             return places[static_cast<size_t>(member)][2 * number] >= 0;
           });
  });
}

// The first member's counters are freed once all members of the host have left them.
void BucketMemory::leave(size_t number) {
  if (!counters_[number]) return;
  counters_[number].left().fetch_add(1, std::memory_order_release);
  if (!window_ || number >= own_counters_.size()) return;
  const SharedCounters own(own_counters_[number].get(), layout_->local_size());
  window_->free_once(std::move(own_counters_[number]), own.left(),
                     static_cast<uint64_t>(layout_->local_size()));
}

void BucketMemory::keep_for_good() {
  new auto(std::move(own_counters_));
  own_counters_.clear();
}

}  // namespace ringdl

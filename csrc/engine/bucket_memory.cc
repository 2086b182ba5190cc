#include "engine/bucket_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/buffer.h"

namespace ringdl {

BucketMemory::BucketMemory(Driver& driver, const BucketPlan& plan, SharedGroup group, Memory where)
    : driver_(driver),
      plan_(plan),
      group_(std::move(group)),
      layout_(driver.layout_of(*group_)),
      shares_(layout_->hosts.size() < group_->ranks.size()),
      window_(shares_ && layout_->local_size() > 1 ? driver.window() : nullptr),
      where_(where),
      arrivals_(plan.buckets.size()),
      counters_(plan.buckets.size()) {
  if (!where_.is_on_device()) return;
  gradients_ = std::make_unique<DeviceGradients>(driver, plan, where_.device);
  for (auto& arrival : arrivals_) arrival = std::make_shared<Arrival>();
}

// Other members may still read counters that were announced to them and then not used.
BucketMemory::~BucketMemory() {
  if (is_connected_ || !window_) return;
  for (auto& memory : own_counters_) {
    const SharedCounters own(memory.get(), layout_->local_size());
    window_->free_once(std::move(memory), own.left(), std::numeric_limits<uint64_t>::max());
  }
}

std::optional<DeviceLibrary::Member> BucketMemory::library_member() const {
  if (!gradients_) return {};
  const auto largest = std::ranges::max_element(plan_.buckets, {}, &BucketLayout::bytes);
  return driver_.library_member(where_.device, *largest, *group_);
}

std::vector<int64_t> BucketMemory::place_on_device() const {
  const bool is_one_host = group_->size() > 1 && layout_->host_count() == 1;
  if (!gradients_ || !is_one_host || driver_.wanted() == Algorithm::kRing) return {};
  const Executor& executor = driver_.devices().of(where_.device);
  return group_->ranks.size() <= executor.most_arrays() ? gradients_->place()
                                                        : std::vector<int64_t>();
}

bool BucketMemory::reach(const ByMember& places) { return gradients_->reach(places); }

std::shared_ptr<std::byte> BucketMemory::allocate_here(size_t bytes) const {
  return window_ ? driver_.allocate(bytes) : allocate(bytes);
}

// A member without others reduces nothing.
void BucketMemory::settle(Way way) {
  way_ = gradients_ && group_->size() == 1 ? Way::kDirect : way;
  storage_ = std::make_shared<BucketStorage>(
      plan_,
      [&](size_t bytes) {
        if (!gradients_) return allocate_here(bytes);
        return driver_.devices().pinned(where_.device, bytes,
                                        [&](size_t size) { return allocate_here(size); });
      },
      way_ != Way::kHere);
  if (!shares_) return;
  const size_t bytes = SharedCounters::bytes(layout_->local_size());
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    places_.push_back(place_of(storage_->bucket(static_cast<int>(i))));
    places_.push_back(-1);
    if (layout_->local_rank != 0) continue;
    own_counters_.push_back(window_ ? window_->allocate_stage(bytes) : allocate(bytes));
    std::memset(own_counters_.back().get(), 0, bytes);
    places_.back() = place_of(own_counters_.back().get());
  }
}

int64_t BucketMemory::place_of(const std::byte* data) const {
  const auto offset = window_ ? window_->offset_of(data, 1) : std::nullopt;
  return offset ? static_cast<int64_t>(*offset) : -1;
}

std::byte* BucketMemory::gradient(int index) {
  if (!gradients_) return storage_->gradient(index);
  const Placement& placement = plan_.placements[static_cast<size_t>(index)];
  return gradients_->bucket(static_cast<size_t>(placement.bucket)).get() + placement.begin;
}

std::shared_ptr<std::byte> BucketMemory::bucket(size_t number) const {
  if (way_ != Way::kHere) return gradients_->bucket(number);
  return {storage_, storage_->bucket(static_cast<int>(number))};
}

std::optional<BucketOnDevice> BucketMemory::on_device(size_t number) const {
  if (!gradients_) return std::nullopt;
  const BucketLayout& layout = plan_.buckets[number];
  const std::shared_ptr<std::byte> here(storage_, storage_->bucket(static_cast<int>(number)));
  return BucketOnDevice{where_.device, gradients_->bucket(number), layout.flags_begin, here,
                        way_,          arrivals_[number]};
}

std::optional<SharedArrays> BucketMemory::connect(size_t number, const ByMember& places) {
  is_connected_ = true;
  if (!shares_ || way_ == Way::kByLibrary || !is_reached(number, places)) return std::nullopt;
  const auto at = [&](int member, size_t place) {
    const auto index = static_cast<size_t>(member);
    return window_->at(group_->ranks[index], static_cast<uint64_t>(places[index][place]));
  };
  SharedArrays shared;
  if (way_ == Way::kDirect) {
    shared.arrays = gradients_->buckets(number);
  } else if (window_) {
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

bool BucketMemory::is_reached(size_t number, const ByMember& places) const {
  return way_ == Way::kDirect ||
         std::ranges::all_of(layout_->hosts, [&](const std::vector<int>& members) {
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
  new auto(std::move(gradients_));
}

}  // namespace ringdl

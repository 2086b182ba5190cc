#include "engine/hosts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/buffer.h"
#include "base/error.h"

namespace ringdl {

Hosts::Hosts(int rank, int size)
    : rank_(rank), size_(size), host_of_rank_(static_cast<size_t>(size)) {
  std::iota(host_of_rank_.begin(), host_of_rank_.end(), 0);
}

void Hosts::use(std::shared_ptr<Window> window, std::vector<int> hosts) {
  window_ = std::move(window);
  host_of_rank_ = std::move(hosts);
  layouts_.clear();
  last_ = nullptr;
  if (!window_ || !share_memory(*group_of_all(rank_, size_))) return;
  slots_memory_ = window_->allocate(Slots::bytes());  // at the same place on all ranks
  if (!slots_memory_) throw OutOfMemory("there is no shared memory for what ranks meet in");
  const uint64_t offset = *window_->offset_of(slots_memory_.get(), Slots::bytes());
  std::vector<std::byte*> memory;
  for (int rank = 0; rank < size_; ++rank) memory.push_back(window_->at(rank, offset));
  slots_ = std::make_shared<Slots>(std::move(memory), rank_);
}

bool Hosts::share_memory(const Group& group) const {
  return window_ != nullptr && group.size() > 1 &&
         std::ranges::all_of(group.ranks, [this](int rank) { return window_->reaches(rank); });
}

const SharedLayout& Hosts::layout_of(const Group& group) {
  if (last_ != nullptr && last_group_ == group.id) return *last_;
  SharedLayout& layout = layouts_[group.id];
  if (!layout) {
    std::vector<int> hosts;
    for (const int rank : group.ranks) hosts.push_back(host_of_rank_[static_cast<size_t>(rank)]);
    layout = std::make_shared<const HostLayout>(HostLayout::of(hosts, group.rank));
  }
  last_group_ = group.id;
  last_ = &layout;
  return layout;
}

std::shared_ptr<std::byte> Hosts::allocate(size_t bytes) const {
  std::shared_ptr<std::byte> memory = window_ ? window_->allocate(bytes) : nullptr;
  return memory ? memory : ringdl::allocate(bytes);
}

}  // namespace ringdl

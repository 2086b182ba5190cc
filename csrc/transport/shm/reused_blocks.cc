#include "transport/shm/reused_blocks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ringdl {
namespace {

const auto kPage = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
constexpr size_t kLeastRegionBytes = 64 << 20;

// After so many takes, pages go back to the system that neither these nor as many before have
// needed; if they are many.
constexpr int kTakesPerPeriod = 512;
constexpr uint64_t kManyBytes = 64 << 20;

// Half of the machine's memory; or, where there is less, a part that leaves as much to others.
std::shared_ptr<std::byte> allocate_region(Window& window, size_t& bytes) {
  const size_t wanted = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * kPage / 2;
  for (bytes = wanted; bytes >= kLeastRegionBytes; bytes /= 2) {
    std::shared_ptr<std::byte> memory = window.allocate(bytes);
    if (memory && bytes == wanted) return memory;
    if (!memory) continue;
    memory = nullptr;
    bytes /= 2;
    return window.allocate(bytes);
  }
  return nullptr;
}

std::byte* page_at(std::byte* address) {
  return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(address) + kPage - 1) / kPage *
                                      kPage);
}

}  // namespace

ReusedBlocks::Region::Region(std::shared_ptr<std::byte> its_memory, size_t bytes)
    : memory(std::move(its_memory)), data(page_at(memory.get())), heap(0, bytes - kPage) {}

ReusedBlocks::ReusedBlocks() : process_(getpid()) {}

void ReusedBlocks::set_window(std::shared_ptr<Window> window) {
  if (getpid() != process_) return;
  const std::lock_guard guard(mutex_);
  if (window == window_) return;
  window_ = std::move(window);
  if (region_) leave_region();
  if (!window_) return;
  size_t bytes = 0;
  std::shared_ptr<std::byte> memory = allocate_region(*window_, bytes);
  if (memory) region_ = std::make_shared<Region>(std::move(memory), bytes);
}

void* ReusedBlocks::take(size_t bytes) {
  if (getpid() != process_) return nullptr;
  const std::lock_guard guard(mutex_);
  if (!region_) return nullptr;
  const std::optional<uint64_t> begin = region_->heap.take(bytes, kPage);
  if (!begin) return nullptr;
  Region& its = *region_;
  const uint64_t end = *begin + bytes;
  its.end_now = std::max(its.end_now, end);
  its.touched_end = std::max(its.touched_end, end);
  if (++its.takes % kTakesPerPeriod == 0) {
    its.remove_pages_above(std::max(its.end_now, its.end_before));
    its.end_before = std::exchange(its.end_now, std::max(end, end_of_taken()));
  }
  const auto at = reinterpret_cast<uintptr_t>(its.data + *begin);
  begin_ = std::min(begin_.load(), at);
  end_ = std::max(end_.load(), at + bytes);
  taken_.emplace(at, Block{region_, bytes});
  return reinterpret_cast<void*>(at);
}

// As Segment::discard() does; where memory is no segment, pages stay.
void ReusedBlocks::Region::remove_pages(uint64_t begin, uint64_t end) {
  std::byte* const first = page_at(data + begin);
  std::byte* const last = page_at(data + end);  // what lies between is free, or the block's own
  if (first < last) madvise(first, static_cast<size_t>(last - first), MADV_REMOVE);
}

void ReusedBlocks::Region::remove_pages_above(uint64_t end) {
  if (touched_end < end + kManyBytes) return;
  remove_pages(end, touched_end);
  touched_end = end;
}

uint64_t ReusedBlocks::end_of_taken() const {
  uint64_t end = 0;
  for (const auto& [at, block] : taken_) {
    if (block.region == region_) end = region_->offset_of(at) + block.bytes;
  }
  return end;
}

// Pages that are free go back now, those of blocks when they are given back.
void ReusedBlocks::leave_region() {
  uint64_t free_begin = 0;
  for (const auto& [at, block] : taken_) {
    if (block.region != region_) continue;
    const uint64_t begin = region_->offset_of(at);
    region_->remove_pages(free_begin, begin);
    free_begin = begin + block.bytes;
  }
  region_->remove_pages(free_begin, std::max(free_begin, region_->touched_end));
  region_ = nullptr;
}

bool ReusedBlocks::give_back(void* block) {
  const auto at = reinterpret_cast<uintptr_t>(block);
  if (at < begin_.load(std::memory_order_relaxed) || at >= end_.load(std::memory_order_relaxed)) {
    return false;
  }
  if (getpid() != process_) return true;  // or one of the parent's others
  const std::lock_guard guard(mutex_);
  const auto found = taken_.find(at);
  if (found == taken_.end()) return false;
  Region& its = *found->second.region;
  if (!found->second.is_kept_for_good) {  // that one is taken as long as its region is there
    const uint64_t begin = its.offset_of(at);
    its.heap.give_back(begin);
    if (found->second.region != region_) its.remove_pages(begin, begin + found->second.bytes);
  }
  taken_.erase(found);
  return true;
}

void ReusedBlocks::keep_for_good(const void* inside) {
  const auto at = reinterpret_cast<uintptr_t>(inside);
  const std::lock_guard guard(mutex_);
  const auto next = taken_.upper_bound(at);
  if (next == taken_.begin()) return;
  const auto its = std::prev(next);
  if (at - its->first < its->second.bytes) its->second.is_kept_for_good = true;
}

}  // namespace ringdl

#include "transport/shm/reused_blocks.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/keep_for_good.h"

namespace ringdl {

ReusedBlocks::ReusedBlocks() : process_(getpid()) {}

void ReusedBlocks::set_window(std::shared_ptr<Window> window) {
  if (getpid() != process_) return;
  const std::lock_guard guard(mutex_);
  if (window == window_) return;
  window_ = std::move(window);
  kept_.clear();
  kept_bytes_ = 0;
}

void* ReusedBlocks::take(size_t bytes) {
  if (getpid() != process_) return nullptr;
  const std::lock_guard guard(mutex_);
  if (!window_) return nullptr;
  size_t its_bytes = bytes;
  std::shared_ptr<std::byte> memory = reuse(bytes, its_bytes);
  if (!memory) {
    let_go(bytes);
    memory = window_->allocate(bytes);
    if (!memory) return nullptr;
  }
  const auto at = reinterpret_cast<uintptr_t>(memory.get());
  begin_ = std::min(begin_.load(), at);
  end_ = std::max(end_.load(), at + its_bytes);
  taken_bytes_ += its_bytes;
  most_bytes_ = std::max(most_bytes_, taken_bytes_);
  void* const data = memory.get();
  taken_.emplace(at, Block{std::move(memory), its_bytes});
  return data;
}

// A kept block of at least so many bytes, and at most an eighth more.
std::shared_ptr<std::byte> ReusedBlocks::reuse(size_t bytes, size_t& its_bytes) {
  const auto found = kept_.lower_bound(bytes);
  if (found == kept_.end() || found->first > bytes + bytes / 8) return nullptr;
  its_bytes = found->first;
  kept_bytes_ -= its_bytes;
  return std::move(kept_.extract(found).mapped());
}

// Frees kept blocks, the largest first, until there is room for so many bytes.
void ReusedBlocks::let_go(size_t bytes) {
  while (!kept_.empty() && taken_bytes_ + kept_bytes_ + bytes > most_bytes_) {
    const auto largest = std::prev(kept_.end());
    kept_bytes_ -= largest->first;
    kept_.erase(largest);
  }
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
  Block its = std::move(found->second);
  taken_.erase(found);
  taken_bytes_ -= its.bytes;
  if (its.is_kept_for_good) {
    ringdl::keep_for_good(std::move(its.memory));
  } else if (window_ && window_->offset_of(block, its.bytes)) {
    kept_bytes_ += its.bytes;
    kept_.emplace(its.bytes, std::move(its.memory));
  }
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

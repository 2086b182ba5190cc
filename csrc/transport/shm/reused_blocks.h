#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "transport/window.h"

namespace ringdl {

/// Blocks of a window's memory for a program that takes and gives back the same sizes again and
/// again: freed ones keep their pages, for the next of about their size. What is taken and kept
/// together is never more than the most that was taken at once.
///
/// Threads: any. In a child made by fork() nothing is taken, and what is given back stays as it is:
/// it is the parent's.
class ReusedBlocks {
 public:
  ReusedBlocks();

  /// Blocks are of this window from now on; null: there are none. Kept ones are freed.
  void set_window(std::shared_ptr<Window> window);

  /// Null: there is no window, or no more memory in it. Aligned as the window's allocations.
  void* take(size_t bytes);

  /// Whether it is one of these. Cheap for others.
  bool give_back(void* block);

  /// Never reuses the block that an address lies in, if it is one of these: another rank that has
  /// not heard of a failure yet may be writing there.
  void keep_for_good(const void* inside);

 private:
  struct Block {
    std::shared_ptr<std::byte> memory;
    size_t bytes;
    bool is_kept_for_good = false;
  };

  std::shared_ptr<std::byte> reuse(size_t bytes, size_t& its_bytes);
  void let_go(size_t bytes);

  const int64_t process_;
  // Bounds of all blocks there were: what lies outside is none.
  std::atomic<uintptr_t> begin_ = UINTPTR_MAX, end_ = 0;

  std::mutex mutex_;
  std::shared_ptr<Window> window_;
  std::map<uintptr_t, Block> taken_;
  std::multimap<size_t, std::shared_ptr<std::byte>> kept_;  // by bytes
  size_t taken_bytes_ = 0, kept_bytes_ = 0, most_bytes_ = 0;
};

}  // namespace ringdl

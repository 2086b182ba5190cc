#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "transport/shm/heap.h"
#include "transport/window.h"

namespace ringdl {

/// Blocks of a window's memory for a program that takes and gives back large ones again and again:
/// what is free keeps its pages for the next, except far above what was taken lately.
///
/// Threads: any. In a child made by fork() nothing is taken, and what is given back stays as it is:
/// it is the parent's.
class ReusedBlocks {
 public:
  ReusedBlocks();

  /// Blocks are of this window from now on; null: there are none. Earlier ones stay valid.
  void set_window(std::shared_ptr<Window> window);

  /// Null: there is no window, or no more memory in it. Aligned as pages.
  void* take(size_t bytes);

  /// Whether it is one of these. Cheap for others.
  bool give_back(void* block);

  /// Never reuses the block that an address lies in, if it is one of these: another rank that has
  /// not heard of a failure yet may be writing there.
  void keep_for_good(const void* inside);

 private:
  // What blocks are taken from: a large part of the window's memory, whose pages exist once
  // touched.
  struct Region {
    Region(std::shared_ptr<std::byte> its_memory, size_t bytes);
    uint64_t offset_of(uintptr_t at) const { return at - reinterpret_cast<uintptr_t>(data); }
    void remove_pages(uint64_t begin, uint64_t end);
    void remove_pages_above(uint64_t end);

    const std::shared_ptr<std::byte> memory;
    std::byte* const data;  // its first page
    Heap heap;              // of offsets from there
    // Ends of what was taken: of all pages that may exist, and of this and of the last period.
    uint64_t touched_end = 0, end_now = 0, end_before = 0;
    int takes = 0;
  };
  struct Block {
    std::shared_ptr<Region> region;
    size_t bytes;
    bool is_kept_for_good = false;
  };

  uint64_t end_of_taken() const;
  void leave_region();

  const int64_t process_;
  // Bounds of all blocks there were: what lies outside is none.
  std::atomic<uintptr_t> begin_ = UINTPTR_MAX, end_ = 0;

  std::mutex mutex_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<Region> region_;
  std::map<uintptr_t, Block> taken_;  // by address; also of earlier regions
};

}  // namespace ringdl

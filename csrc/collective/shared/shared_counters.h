#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace ringdl {

/// Counters of ranks that share memory: monotone, compared by >=, a cache line each. A view of
/// memory that all of them see and that was all zeros when the first of them got it.
class SharedCounters {
 public:
  using Counter = std::atomic<uint64_t>;
  static_assert(Counter::is_always_lock_free);

  SharedCounters() = default;
  SharedCounters(std::byte* memory, int size) : memory_(memory), size_(size) {}

  /// Whether this is a view of any memory.
  explicit operator bool() const { return memory_ != nullptr; }

  static size_t bytes(int size) { return kLineBytes * (2 + 3 * static_cast<size_t>(size)); }

  /// Pieces that are reduced.
  Counter& done() const { return at(0); }
  /// Ranks that will not read these counters again.
  Counter& left() const { return at(1); }
  /// What a rank has made available.
  Counter& ready(int rank) const { return at(2 + rank); }
  /// Pieces of a rank's own part that a rank has claimed, or that are reduced.
  Counter& claimed(int rank) const { return at(2 + size_ + rank); }
  /// What a rank has copied.
  Counter& copied(int rank) const { return at(2 + 2 * size_ + rank); }

  using ByRank = Counter& (SharedCounters::*)(int) const;
  /// The least value of a counter over the ranks other than `rank`; the largest number if there are
  /// none.
  uint64_t least_of_others(int rank, ByRank counter) const {
    uint64_t least = std::numeric_limits<uint64_t>::max();
    for (int other = 0; other < size_; ++other) {
      if (other == rank) continue;
      least = std::min(least, (this->*counter)(other).load(std::memory_order_acquire));
    }
    return least;
  }

 private:
  static constexpr size_t kLineBytes = 64;
  Counter& at(int number) const {
    return *reinterpret_cast<Counter*>(memory_ + kLineBytes * static_cast<size_t>(number));
  }

  std::byte* memory_ = nullptr;
  int size_ = 0;
};

/// Where the ranks that share memory have an array, as this process sees them.
struct SharedArrays {
  std::vector<std::byte*> arrays;  // by rank
  SharedCounters counters;
};

}  // namespace ringdl

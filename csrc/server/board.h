#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringdl {

/// What a rank shows the others of its host, before its shard: a view of memory that they share,
/// all zeros in the beginning.
class Board {
 public:
  static constexpr size_t kBytes = 128;  // a cache line each

  /// @param memory  at a multiple of 64
  explicit Board(std::byte* memory) : memory_(memory) {}

  /// Ranks that will not use the memory again.
  std::atomic<uint64_t>& left() const { return counter(0); }
  /// See Clocks.
  std::atomic<uint64_t>& clock() const { return counter(64); }

 private:
  std::atomic<uint64_t>& counter(size_t place) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(memory_ + place);
  }

  std::byte* memory_;
};

/// How many steps of each member are in the parameters. A member of this host writes its own on its
/// board; of the others this rank is told, and notes it here.
///
/// Threads: any, after connect().
class Clocks {
 public:
  explicit Clocks(int members) : noted_(static_cast<size_t>(members)) {
    for (auto& each : noted_) places_.push_back(&each);
  }

  void connect(int member, const Board& board) {
    places_[static_cast<size_t>(member)] = &board.clock();
  }
  void set(int member, uint64_t steps) {
    places_[static_cast<size_t>(member)]->store(steps, std::memory_order_release);
  }
  uint64_t of(int member) const {
    return places_[static_cast<size_t>(member)]->load(std::memory_order_acquire);
  }

 private:
  std::vector<std::atomic<uint64_t>> noted_;
  std::vector<std::atomic<uint64_t>*> places_;
};

}  // namespace ringdl

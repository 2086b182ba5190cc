#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "base/clock.h"

namespace ringdl {

/// How a rank best stores what another rank of its host reads next: into its cache, from where the
/// lines come to the other core, or past the caches, so that they come from memory.
///
/// That depends on where the two cores are. Past the caches takes a fifth more time if they share
/// one, and a third of the time if they do not; a virtual machine does not say which it is. So both
/// are tried in the first large arrays, block by block in turns, and the majority of pairs decides:
/// what is compared is the time in which this rank stores and reads, without its waits.
///
/// Threads: one at a time. Arrays in flight at once disturb the trial, and nothing else.
class StoreTrial {
 public:
  /// Whether block number `block` of an array goes past the caches.
  bool streams(uint64_t block) const { return is_over() ? streams_ : block % 2 == 0; }

  bool is_over() const { return pairs_ == kPairs; }

  /// Calls what stores a part of a block, or reads that of others.
  template <class Action>
  void time(uint64_t block, const Action& action) {
    if (is_over()) return action();
    const int64_t begin = now_ns();
    action();
    spent_[block % 2] += now_ns() - begin;
  }

  /// All of a block is stored and read.
  /// @param is_whole  as long as the one before
  void end(uint64_t block, bool is_whole) {
    taken_[block % 2] = std::exchange(spent_[block % 2], 0);
    if (is_over() || block % 2 == 0 || !is_whole) return;
    streamed_won_ += taken_[0] < taken_[1] ? 1 : 0;
    streams_ = 2 * streamed_won_ > ++pairs_;
  }

 private:
  static constexpr int kPairs = 32;  // 64 MiB of an array in blocks of 1 MiB

  std::array<int64_t, 2> spent_{};  // nanoseconds, on the even and the odd block under way
  std::array<int64_t, 2> taken_{};  // by the last ones that have ended
  int pairs_ = 0;
  int streamed_won_ = 0;
  bool streams_ = true;
};

}  // namespace ringdl

#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <utility>

#include "base/clock.h"

namespace ringdl {

/// How a rank best stores what another rank of its host reads next, and what it has read from
/// others: into its cache, from where the lines reach the other core, or past the caches, so that
/// they come from memory.
///
/// That depends on where the two cores are. Past the caches takes a fifth more time if they share
/// one, and half the time or less if they do not. A virtual machine does not report which, and its
/// cores are moved, on some every second. So both are tried again and again, in two blocks of an
/// array, and the last few pairs decide: they compare the CPU time in which this rank stores and
/// reads, without its waits.
///
/// Threads: one at a time. Arrays in flight at once disturb only the trial.
class StoreTrial {
 public:
  /// The number of the first block of an array of `blocks` blocks; the others' follow.
  uint64_t begin(uint64_t blocks) {
    return std::exchange(next_block_, next_block_ + blocks + blocks % 2);
  }

  /// Whether a block goes past the caches.
  bool streams(uint64_t block) const { return is_tried(block) ? block % 2 == 0 : streams_; }

  /// Times an action that stores a part of a block, or reads that of others.
  template <class Action>
  void time(uint64_t block, const Action& action) {
    if (!is_tried(block)) return action();
    const int64_t begin = thread_cpu_ns();
    action();
    spent_[block % 2] += thread_cpu_ns() - begin;
  }

  /// All of a block has been stored and read.
  /// @param is_whole  as long as the one before
  void end(uint64_t block, bool is_whole) {
    if (!is_tried(block)) return;
    taken_[block % 2] = std::exchange(spent_[block % 2], 0);
    if (block % 2 == 0 || !is_whole) return;
    streamed_won_ = streamed_won_ << 1 | (taken_[0] < taken_[1] ? 1u : 0u);
    streams_ = 2 * std::popcount(streamed_won_ & ((1u << kVotes) - 1)) > kVotes;
  }

 private:
  // If the slower way takes twice as long, one block of 32 costs 3%. With blocks of 1 MiB a change
  // is noticed after 64 to 96 MiB.
  static constexpr uint64_t kPairsPerTrial = 16;
  static constexpr int kVotes = 3;

  static bool is_tried(uint64_t block) {
    return block / 2 < kVotes || block / 2 % kPairsPerTrial == 0;
  }

  std::array<int64_t, 2> spent_{};  // nanoseconds, on the even and the odd block under way
  std::array<int64_t, 2> taken_{};  // by the last blocks that have ended
  uint64_t next_block_ = 0;
  uint32_t streamed_won_ = ~0u;  // a bit per pair, the last one lowest
  bool streams_ = true;
};

}  // namespace ringdl

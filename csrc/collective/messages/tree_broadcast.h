#pragma once

#include "collective/collective.h"

namespace ringdl {

/// Copies the root's data to all ranks along a binomial tree, in ceil(log2 P) rounds: for arrays
/// that would take longer along a chain of all ranks.
///
/// Ranks are counted from the root. In the round of distance d, half that of the round before, each
/// rank sends a message to the one d after it and receives one from the one d before it. It is the
/// data if the sender has it and the receiver lacks it, else empty. So data goes from the root to
/// the middle, then from both to the quarters, and enters each block of 2^k ranks once. A rank
/// sends only once its earlier rounds are complete, so none is done before all have begun with the
/// same arguments (as in Barrier, whose rounds may come in any order).
class TreeBroadcast final : public Collective {
 public:
  /// @param data  `bytes` bytes: the source on `root`, the target elsewhere; the caller's
  TreeBroadcast(std::byte* data, size_t bytes, int root, int rank, int size, size_t segment_bytes);

  /// Whether it is faster than the chain, in which P-1 ranks pass on each segment while the next
  /// one arrives.
  static bool is_faster(size_t bytes, int size, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  // Whether the message from a place to the one `distance_` after it is the data; places are ranks
  // counted from the root.
  bool is_data(int from_place, int distance) const {
    return from_place % (2 * distance) == 0 && from_place + distance < size_;
  }
  int64_t messages(int from_place, int distance) const {
    return is_data(from_place, distance) ? segments_ : 1;
  }
  int rank_at(int place) const { return (root_ + place + size_) % size_; }

  std::byte* const data_;
  const size_t bytes_;
  const int root_;
  const int size_;
  const int place_;
  const size_t segment_bytes_;
  const int64_t segments_;
  int distance_;  // of this round; 0: all are complete
  int64_t posted_ = 0;
  int64_t launched_ = 0;
};

}  // namespace ringdl

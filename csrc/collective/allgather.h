#pragma once

#include <vector>

#include "collective/collective.h"

namespace ringdl {

/// Collects every rank's block on every rank, in rank order; blocks may differ in length.
///
/// Around the ring, twice: first the lengths, eight bytes each, then the blocks in segments, each
/// passed on as it arrives: every rank receives each other block once, the least that is possible.
class Allgather final : public Collective {
 public:
  /// @param block  this rank's `bytes` bytes; the caller's, only read
  /// @param order  where in the result each rank's block goes: the rank that it counts as there
  Allgather(const std::byte* block, size_t bytes, std::vector<int> order, int rank,
            size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

  Gathered* gathered() override { return &result_; }

 private:
  static constexpr int64_t kDepth = 4;

  struct Piece {
    size_t begin;  // in result_
    size_t bytes;
  };

  bool gather_lengths(Channel& channel);
  void begin_blocks();
  std::vector<Piece> pieces_of(int first, int count) const;

  size_t place_of(int64_t rank) const {
    return static_cast<size_t>(order_[(rank + size_) % size_]);
  }

  const std::byte* block_;
  std::vector<int> order_;
  int rank_;
  int size_;
  size_t segment_bytes_;
  int64_t lengths_posted_ = 0;
  int64_t lengths_sent_ = 0;
  bool blocks_begun_ = false;
  Gathered result_;
  std::vector<Piece> incoming_;  // in the order of their arrival
  std::vector<Piece> outgoing_;
  int64_t own_pieces_ = 0;  // the first of outgoing_, which wait for nothing
  int64_t posted_ = 0;
  int64_t received_ = 0;
  int64_t launched_ = 0;
};

}  // namespace ringdl

#pragma once

#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/partition.h"

namespace ringdl {

/// Passes each rank's block around the ring, in segments, as they arrive: every rank receives each
/// other block once, which is the minimum.
class RingBlocks final : public Collective {
 public:
  /// @param data    holds the own block and room for the others; the caller's
  /// @param blocks  of `data`, by rank; the same lengths on all ranks
  RingBlocks(std::byte* data, const std::vector<Span>& blocks, int rank, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

  /// How many other blocks have arrived: those of the ranks before this one, backwards.
  int blocks_here() const;

 private:
  static constexpr int64_t kDepth = 4;

  std::byte* data_;
  int rank_;
  int size_;
  std::vector<Span> incoming_;  // in the order of their arrival
  std::vector<Span> outgoing_;
  std::vector<int64_t> ends_;  // of each incoming block, counted in segments
  int64_t own_segments_ = 0;   // the first of outgoing_, which wait for nothing
  int64_t posted_ = 0;
  int64_t received_ = 0;
  int64_t launched_ = 0;
};

}  // namespace ringdl

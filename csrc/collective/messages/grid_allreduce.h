#pragma once

#include <string>
#include <vector>

#include "base/buffer.h"
#include "collective/collective.h"
#include "collective/messages/ring_allreduce.h"
#include "collective/messages/ring_blocks.h"
#include "collective/messages/ring_reduce_scatter.h"
#include "collective/operations.h"
#include "collective/sub_channel.h"

namespace ringdl {

/// The columns of the grid that so many ranks form: the least divisor that is not below the square
/// root; all of them, a single row, if that is a prime.
int grid_columns(int size);

/// Reduces `data` over all ranks, in place, by rings along the rows and the columns of a grid: the
/// same bytes as one ring over all, in far fewer steps, each of which takes a latency: of 512 ranks
/// 92 instead of 1,022 (the 2D ring of Jia and others 2018, "Highly scalable deep learning training
/// system with mixed-precision").
///
///     row 0:   0  1  2  3    reduce-scatter along rows: each rank has the sum of its row's chunk
///     row 1:   4  5  6  7    allreduce along columns:   ... of that chunk over all ranks
///     row 2:   8  9 10 11    allgather along rows:      each rank has all chunks
///
/// A chunk is summed in the order of the ring of its row, then of its column. No rank is done while
/// two disagree: what it has depends on all, and passed only neighbours that agree.
class GridAllreduce final : public Collective {
 public:
  /// @param data  `bytes` bytes, this rank's contribution and then the result; the caller's
  /// @param columns  a divisor of the number of ranks
  /// @param segment_bytes  what is sent and reduced at once; the same on all ranks
  GridAllreduce(Executor& executor, std::byte* data, size_t bytes, const Reducer& reducer, int rank,
                int size, int columns, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  enum class Phase { kScatter, kReduce, kCopy, kGather, kDone };

  Executor& executor_;
  std::byte* data_;
  const std::vector<Span> chunks_;  // by column
  const Span own_;
  Buffer sum_;  // of the own chunk
  SubChannel row_;
  SubChannel column_;
  RingReduceScatter scatter_;
  RingAllreduce reduce_;
  RingBlocks gather_;
  Operations copies_;
  Phase phase_ = Phase::kScatter;
  bool has_begun_ = false;  // this phase
};

}  // namespace ringdl

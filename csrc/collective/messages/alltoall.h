#pragma once

#include <vector>

#include "collective/block.h"
#include "collective/collective.h"
#include "reduce/executor.h"

namespace ringdl {

/// Sends each rank a block of its own and collects the blocks meant for this rank, in rank order.
///
/// Every pair of ranks first exchanges the lengths, eight bytes, and then the blocks in segments,
/// pairwise (Thakur, Rabenseifner & Gropp 2005): in step s a rank sends to rank + s and receives
/// from rank - s. Some steps overlap, so that a slow pair does not hold up others.
///
/// No rank can finish while two disagree: each receives a length from every other one.
class Alltoall final : public Collective {
 public:
  /// @param data        the blocks for rank 0, 1, ... one after the other; the caller's, only read
  /// @param send_bytes  the length of the block for each rank, not negative; any on each rank
  Alltoall(Executor& executor, const std::byte* data, std::vector<int64_t> send_bytes, int rank,
           int size, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

  /// Once done: the bytes that each rank sent here, and the blocks one after the other.
  Gathered* gathered() override { return &result_; }

 private:
  bool exchange_lengths(Channel& channel);
  void begin_blocks();

  Executor& executor_;
  const std::byte* data_;
  std::vector<int64_t> send_bytes_;
  int rank_;
  int size_;
  size_t segment_bytes_;
  bool lengths_begun_ = false;
  int heard_ = 0;  // lengths received, in the order of the steps
  bool blocks_begun_ = false;
  Gathered result_;
  Executor::Ticket copied_ = Executor::kDone;  // this rank's block
  std::vector<OutgoingBlock> outgoing_;        // in the order of the steps
  std::vector<IncomingBlock> incoming_;
  size_t out_ = 0;  // blocks that have left, counted in order
  size_t in_ = 0;   // blocks that have arrived, counted in order
};

}  // namespace ringdl

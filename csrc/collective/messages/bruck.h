#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "collective/block.h"
#include "collective/collective.h"
#include "reduce/executor.h"

namespace ringdl {

/// Collects a block of known length from every rank on every rank, in ceil(log2 P) rounds (Bruck,
/// Ho, Kipnis, Upfal & Weathersby 1997): in round k a rank sends all that it has, the blocks of the
/// 2^k ranks up to itself, to rank + 2^k and receives as many from rank - 2^k. The first message
/// goes to the next rank, so the header is sent along.
///
/// Every rank receives each other block once, as around a ring, but in few messages; on a link that
/// ranks share, blocks cross more than once. A rank sends in a round only what it has received in
/// earlier ones, so if no block is empty, no rank has all blocks before all ranks have begun with
/// the same arguments.
class Bruck final : public Collective {
 public:
  /// @param lengths  of the blocks in bytes, by rank; the same on all ranks
  /// @param own      this rank's block, which is copied
  Bruck(Executor& executor, const std::vector<size_t>& lengths, int rank, const void* own);

  /// True once all blocks have arrived and nothing is being sent. May be called after that.
  bool step(Channel& channel) override;
  std::string describe() const override;

  /// Whether all blocks have arrived; this rank has then sent the others all that they wait for.
  bool is_complete() const { return here_ == size_; }
  /// How many blocks have arrived: those of the ranks up to this one, backwards.
  int blocks_here() const { return here_; }
  /// A block that has arrived.
  const std::byte* block(int rank) const {
    return blocks_.data() + begins_[static_cast<size_t>((rank_ - rank + size_) % size_)];
  }

 private:
  Executor& executor_;
  const int rank_;
  const int size_;
  std::vector<size_t> begins_;  // of the blocks of this rank, the one before, ...; the end
  std::vector<std::byte> blocks_;
  Executor::Ticket copied_;  // this rank's block
  int here_ = 1;
  size_t rounds_ = 0;                    // that are complete
  std::vector<OutgoingBlock> outgoing_;  // by round
  std::vector<IncomingBlock> incoming_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "collective/block.h"
#include "collective/collective.h"
#include "reduce/executor.h"

namespace ringdl {

/// Collects a block of known length from every rank on every rank, in ceil(log2 P) rounds (Bruck,
/// Ho, Kipnis, Upfal & Weathersby 1997): in round k a rank sends to rank + 2^k all that it has, the
/// blocks of the 2^k ranks up to itself, and receives as many from rank - 2^k. The first to hear of
/// a rank is the next one, so the header goes along.
///
/// Every rank receives each other block once, as around a ring, but in few messages; where ranks
/// share a link, blocks cross it more often than once. A rank sends in a round only what it has
/// received in those before, so if no block is empty, none has all before all have begun with the
/// same arguments.
class Bruck final : public Collective {
 public:
  /// @param lengths  of the blocks in bytes, by rank; the same on all ranks
  /// @param own      this rank's block, which is copied
  Bruck(Executor& executor, const std::vector<size_t>& lengths, int rank, const void* own);

  /// True once all blocks are here and nothing is being sent. May be called after that.
  bool step(Channel& channel) override;
  std::string describe() const override;

  /// Whether all blocks are here; this rank has then told the others all that they wait for.
  bool is_complete() const { return here_ == size_; }
  /// So many blocks are here: those of the ranks up to this one, backwards.
  int blocks_here() const { return here_; }
  /// A block that is here.
  const std::byte* block(int rank) const {
    return blocks_.data() + begins_[static_cast<size_t>((rank_ - rank + size_) % size_)];
  }

 private:
  Executor& executor_;
  const int rank_;
  const int size_;
  std::vector<size_t> begins_;  // of the blocks of this rank, the one before, and so on; the end
  std::vector<std::byte> blocks_;
  Executor::Ticket copied_;  // the own one
  int here_ = 1;
  size_t rounds_ = 0;                    // that are complete
  std::vector<OutgoingBlock> outgoing_;  // by round
  std::vector<IncomingBlock> incoming_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "server/pieces.h"
#include "server/shard.h"
#include "transport/window.h"

namespace ringdl {

/// One pass over all blocks of some shards: a state machine, which never waits.
///
/// A shard's blocks are taken in their order, and each lock is given back only when the next one is
/// held. So passes do not overtake one another, and of two of them one is first in all blocks of a
/// shard, as if the shard had one lock; while they work in several blocks at once.
class Visit {
 public:
  /// What is done to a part of a block whose lock is held.
  /// @param begin  in the shard
  /// @param is_last  whether it is the last one of this block
  using Action = std::function<void(const Shard& shard, size_t begin, std::byte* data, size_t count,
                                    bool is_last)>;

  /// @param shards  in the order in which they are visited; they live as long
  /// @param pieces  of all their parameters, in their order
  Visit(std::span<const Shard> shards, std::vector<Piece> pieces, int rank, const Window* window,
        Action action);
  /// Gives back what is held.
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  bool is_done() const { return visited_ == shards_.size(); }
  /// Does the next block, if its lock is free. @returns whether it was
  /// @param looks_for_dead  whether to ask if the lock's holder has ended, some 10 us
  bool step(bool looks_for_dead = false);
  /// Who had the next block's lock when it was not free; -1 if it was.
  int awaited() const { return awaited_; }

 private:
  const Shard& shard() const { return shards_[visited_]; }
  void skip_empty();

  const std::span<const Shard> shards_;
  const std::vector<Piece> pieces_;
  const int rank_;
  const Window* const window_;
  const Action action_;
  size_t visited_ = 0;  // shards
  size_t block_ = 0;
  BlockLock* held_ = nullptr;
  int awaited_ = -1;
};

}  // namespace ringdl

#pragma once

#include <vector>

#include "collective/block.h"
#include "collective/collective.h"
#include "reduce/executor.h"

namespace ringdl {

/// Collects every rank's block on the root, in rank order; blocks may differ in length.
///
/// Each rank sends the root its length, eight bytes. Once the root has all lengths and has made
/// room, it asks each rank for its block with an empty message; the block arrives straight in its
/// place, in segments.
///
/// No rank can finish while two disagree: the root has heard from all before it asks the first, and
/// no other rank is done before it is asked.
class Gather final : public Collective {
 public:
  /// @param block  this rank's `bytes` bytes; the caller's, only read
  Gather(Executor& executor, const std::byte* block, size_t bytes, int root, int rank, int size,
         size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

  /// Once done, on the root: the bytes of each rank's block, and the blocks one after the other.
  /// Empty elsewhere.
  Gathered* gathered() override { return &result_; }

 private:
  int other(int i) const { return (root_ + 1 + i) % size_; }
  bool give(Channel& channel);
  bool hear(Channel& channel);
  void ask(Channel& channel);
  bool collect(Channel& channel);

  Executor& executor_;
  const std::byte* block_;
  int64_t bytes_;
  int root_;
  int rank_;
  int size_;
  size_t segment_bytes_;
  bool begun_ = false;
  OutgoingBlock outgoing_;
  Gathered result_;
  int heard_ = 0;  // lengths received, counted in order
  bool asked_ = false;
  Executor::Ticket copied_ = Executor::kDone;  // of the root's block
  int asks_left_ = 0;                          // asks that have left, counted in order
  std::vector<IncomingBlock> incoming_;        // those that have not arrived yet
};

}  // namespace ringdl

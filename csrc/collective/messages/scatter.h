#pragma once

#include <optional>
#include <vector>

#include "collective/block.h"
#include "collective/collective.h"
#include "reduce/executor.h"

namespace ringdl {

/// Gives each rank its block of the root's data; blocks may differ in length.
///
/// Each rank announces itself to the root with an empty message; once the root has heard all, it
/// sends each the length, eight bytes, and then the block in segments.
///
/// No rank can finish while two disagree: the root has heard from all before it sends anything, and
/// no other rank is done before the root's length has arrived.
class Scatter final : public Collective {
 public:
  /// @param data        on the root, the blocks for rank 0, 1, ... one after the other; the
  ///                    caller's, only read. Ignored elsewhere
  /// @param send_bytes  on the root, the length of each rank's block, not negative. Ignored
  ///                    elsewhere
  Scatter(Executor& executor, const std::byte* data, std::vector<int64_t> send_bytes, int root,
          int rank, int size, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

  /// Once done: this rank's block.
  Gathered* gathered() override { return &result_; }

 private:
  int other(int i) const { return (root_ + 1 + i) % size_; }
  bool take(Channel& channel);
  bool hear(Channel& channel);
  void begin_blocks(Channel& channel);

  Executor& executor_;
  const std::byte* data_;
  std::vector<int64_t> send_bytes_;
  int root_;
  int rank_;
  int size_;
  size_t segment_bytes_;
  bool begun_ = false;
  bool blocks_begun_ = false;                  // on the root
  Executor::Ticket copied_ = Executor::kDone;  // of the root's block
  int64_t length_ = -1;
  Gathered result_;
  int heard_ = 0;                          // other ranks that have arrived, in order
  std::optional<IncomingBlock> incoming_;  // once its length is known
  std::vector<OutgoingBlock> outgoing_;    // those that have not left yet
};

}  // namespace ringdl

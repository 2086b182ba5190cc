#pragma once

#include "collective/messages/barrier.h"
#include "collective/partition.h"

namespace ringdl {

/// Copies the root's data to all ranks, in segments along the chain root, root+1, ..., root-1.
///
/// Each rank passes a segment on while the next one arrives. A barrier runs beside it, so that no
/// rank is done before all are known to have named the same root, shape and dtype.
class Broadcast final : public Collective {
 public:
  /// @param data  `bytes` bytes: the source on `root`, the target elsewhere; the caller's
  Broadcast(std::byte* data, size_t bytes, int root, int rank, int size, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  static constexpr int64_t kDepth = 4;

  std::byte* data_;
  Partition partition_;
  bool receives_;
  bool sends_;
  int64_t posted_ = 0;
  int64_t received_ = 0;
  int64_t launched_ = 0;
  Barrier barrier_;
  bool barrier_done_ = false;
};

}  // namespace ringdl

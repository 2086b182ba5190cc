#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/sub_channel.h"
#include "collective/two_levels.h"

namespace ringdl {

/// Collects every rank's block on every rank, in rank order; blocks may differ in length.
///
/// First the lengths go around the ring, eight bytes each, then the blocks: around the ring, too,
/// or on two levels. No rank can finish while two disagree: the last length has passed all others.
class Allgather final : public Collective {
 public:
  /// @param block  this rank's `bytes` bytes; the caller's, only read
  /// @param order  where in the result each rank's block goes: the rank that it counts as there
  /// @param levels  if there are two
  Allgather(const std::byte* block, size_t bytes, std::vector<int> order, int rank,
            size_t segment_bytes, std::optional<Levels> levels = std::nullopt);

  bool step(Channel& channel) override;
  int64_t pieces() const override { return blocks_ ? blocks_->pieces() : -1; }
  std::string describe() const override;

  Gathered* gathered() override { return &result_; }

 private:
  bool gather_lengths(Channel& channel);
  void begin_blocks();

  size_t place_of(int64_t rank) const {
    return static_cast<size_t>(order_[(rank + size_) % size_]);
  }

  const std::byte* block_;
  std::vector<int> order_;
  int rank_;
  int size_;
  size_t segment_bytes_;
  std::optional<Levels> levels_;
  int64_t lengths_posted_ = 0;
  int64_t lengths_sent_ = 0;
  Gathered result_;
  SubChannel after_lengths_;
  std::unique_ptr<Collective> blocks_;
};

}  // namespace ringdl

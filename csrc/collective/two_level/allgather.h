#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/messages/bruck.h"
#include "collective/sub_channel.h"
#include "collective/two_level/two_levels.h"
#include "reduce/executor.h"

namespace ringdl {

/// Collects every rank's block on every rank, in rank order; blocks may differ in length.
///
/// First all ranks collect the lengths by Bruck's algorithm, with the blocks if these are short.
/// Else the blocks follow: by the same algorithm if their total is short, around the ring, or on
/// two levels. No rank can finish while two disagree: until all agree, none has all lengths.
class Allgather final : public Collective {
 public:
  /// @param block  this rank's `bytes` bytes; the caller's, only read
  /// @param order  the place of each rank's block in the result
  /// @param few_bytes  blocks of at most this total go in rounds, not around the ring; the same on
  /// all ranks
  /// @param levels  if there are two
  Allgather(Executor& executor, const std::byte* block, size_t bytes, std::vector<int> order,
            int rank, size_t segment_bytes, size_t few_bytes,
            std::optional<Levels> levels = std::nullopt);

  bool step(Channel& channel) override;
  int64_t pieces() const override { return blocks_ ? blocks_->pieces() : -1; }
  std::string describe() const override;

  Gathered* gathered() override { return &result_; }

 private:
  // What is collected first: a block's length and its beginning.
  static constexpr size_t kHeadBytes = 32;
  using Entry = std::array<std::byte, sizeof(int64_t) + kHeadBytes>;

  bool collect_entries(Channel& channel);
  void begin();
  void take(const std::function<const std::byte*(int)>& block_of);
  size_t place_of(int rank) const { return static_cast<size_t>(order_[static_cast<size_t>(rank)]); }

  Executor& executor_;
  const std::byte* block_;
  std::vector<int> order_;
  int rank_;
  int size_;
  size_t segment_bytes_;
  size_t few_bytes_;
  std::optional<Levels> levels_;
  Entry entry_{};
  std::optional<Bruck> entries_;  // once this rank's entry is complete
  bool has_head_ = false;         // entry_ is complete, once the copy is
  bool has_begun_ = false;
  Gathered result_;
  std::vector<Span> spans_;                    // of the result, by rank
  Executor::Ticket copied_ = Executor::kDone;  // the last copy
  SubChannel after_lengths_;
  bool follow_ = false;                 // the blocks do not arrive with the lengths
  std::unique_ptr<Collective> blocks_;  // once they are under way
  const Bruck* rounds_ = nullptr;       // blocks_, if it is a Bruck
  bool has_taken_ = false;
};

}  // namespace ringdl

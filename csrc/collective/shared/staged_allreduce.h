#pragma once

#include <string>
#include <vector>

#include "collective/partition.h"
#include "collective/shared/in_memory.h"
#include "collective/shared/shared_counters.h"
#include "reduce/executor.h"
#include "transport/store_trial.h"

namespace ringdl {

/// Allreduce on one host of arrays that only their owners reach: block by block, through stages
/// that all ranks see and that stay in the caches. Each rank copies what others reduce of its block
/// into its stage, reduces its own chunk of the block, in rank order, into the stages of all, and
/// copies what the others have put into its stage back into its array. An array is read once and
/// written once, as in DirectAllreduce, which gives the same bits; what is added to that stays in
/// the caches.
class StagedAllreduce final : public InMemory {
 public:
  /// Bytes of each rank's stage.
  /// @param grain  the executor's
  /// @param bytes  of the array
  static size_t stage_bytes(Executor::Grain grain, size_t bytes, int size);

  /// @param stages  by rank, as this process sees them
  /// @param counters  not used before
  /// @param trial  of the memory that the stages lie in; outlives this
  StagedAllreduce(Executor& executor, std::vector<std::byte*> stages, SharedCounters counters,
                  std::byte* data, size_t bytes, ReduceMany reduce_many, int rank,
                  StoreTrial& trial);
  /// Waits for what was asked of the executor, which writes to stages of others.
  ~StagedAllreduce() override { await(executor_, asked_); }

  bool step_in_memory() override;
  int64_t pieces() const override { return static_cast<int64_t>(next_); }
  std::string describe() const override;

 private:
  int size() const { return static_cast<int>(stages_.size()); }
  bool all_have_done(uint64_t steps);
  bool do_next();
  bool streams_block(uint64_t block) const {
    return streams_ && trial_.streams(first_block_ + block);
  }
  void timed(uint64_t block, Executor::Ticket (StagedAllreduce::*part)(uint64_t) const);
  Executor::Ticket copy_in(uint64_t block) const;
  Executor::Ticket reduce(uint64_t block) const;
  Executor::Ticket copy_out(uint64_t block) const;
  std::byte* stage(int rank, uint64_t block) const;
  std::byte* array(uint64_t block) const {
    return data_ + static_cast<size_t>(block) * block_bytes_;
  }
  Span chunk(int rank, uint64_t block) const;  // of a block, from its beginning

  Executor& executor_;
  const std::vector<std::byte*> stages_;
  const SharedCounters counters_;
  std::byte* const data_;
  const size_t bytes_;
  const ReduceMany reduce_many_;
  const int rank_;
  const size_t chunk_bytes_;
  const size_t block_bytes_;
  const uint64_t blocks_;
  const bool streams_;  // past the caches, if that is faster
  StoreTrial& trial_;
  const uint64_t first_block_;  // there
  uint64_t next_ = 0;           // step,
  bool has_asked_ = false;      // and whether the executor was asked for it
  Executor::Ticket asked_ = Executor::kDone;
  uint64_t all_have_done_ = 0;  // steps, at least
};

}  // namespace ringdl

#pragma once

#include <string>

#include "collective/operations.h"
#include "collective/shared/in_memory.h"
#include "collective/shared/shared_counters.h"

namespace ringdl {

/// Allreduce of arrays that all ranks can read and write, in one pass: pieces are read from all of
/// them, reduced in rank order, and written to all. That is one array read and one written per
/// rank, which is as little as can be. Each rank takes the pieces of its own part, then, with these
/// done, whatever nobody has taken, so that nobody waits for a rank that the system has put to
/// sleep.
class DirectAllreduce final : public InMemory {
 public:
  /// @param instance  how often these counters were used before, by all ranks
  DirectAllreduce(Executor& executor, SharedArrays shared, uint64_t instance, size_t bytes,
                  ReduceMany reduce_many, int rank);
  /// Waits for what was asked of the executor, which writes to arrays of others.
  ~DirectAllreduce() override;

  bool step_in_memory() override;
  int64_t pieces() const override { return reduced_; }
  std::string describe() const override;

 private:
  int size() const { return static_cast<int>(shared_.arrays.size()); }
  uint64_t first_piece(int rank) const {
    return pieces_ * static_cast<uint64_t>(rank) / static_cast<uint64_t>(size());
  }
  bool all_ready();
  bool claim(int rank, uint64_t& piece);
  bool claim_others(uint64_t& piece);
  Executor::Ticket reduce(uint64_t piece);
  void notify_reduced();

  Executor& executor_;
  const SharedArrays shared_;
  const uint64_t instance_;
  const size_t bytes_;
  const ReduceMany reduce_many_;
  const int rank_;
  const size_t piece_bytes_;
  const uint64_t pieces_;
  bool has_arrived_ = false;
  int ready_ = 0;  // ranks 0 .. ready_-1 have arrived
  Operations reductions_;
  int64_t reduced_ = 0;  // of those, and told
};

}  // namespace ringdl

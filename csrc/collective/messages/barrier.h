#pragma once

#include "collective/algorithm.h"
#include "collective/collective.h"

namespace ringdl {

/// Ends on no rank before all ranks have begun with the same arguments.
///
/// Dissemination (Hensgen, Finkel & Manber 1988): in round k rank r notifies rank r + 2^k and waits
/// for rank r - 2^k, ceil(log2 P) rounds. Round 0 is the header that each rank sends to the next
/// anyway; a rank goes on to round 1 only if it agrees, so one wrong rank holds up all.
class Barrier final : public Collective {
 public:
  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  int round_ = 0;  // rounds that are complete
  int sent_ = 0;   // messages that have left, counted in order
};

/// MPI's own allreduce: Python calls it once this barrier has found that all ranks agree.
extern const AllreduceAlgorithm kMpiAlgorithm;

}  // namespace ringdl

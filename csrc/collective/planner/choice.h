#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "collective/algorithm.h"
#include "collective/host_layout.h"
#include "collective/planner/algorithms.h"

namespace ringdl {

/// The cost of allreduces, as far as needed to choose one: a straight line per algorithm, by its id
/// (Hockney 1994).
struct CostModel {
  std::vector<Cost> inside;   // a host
  std::vector<Cost> between;  // several
};

/// The built-in costs. `python -m ringdl tune` measures those of another machine.
CostModel default_costs();

/// Whether an algorithm can be chosen for an array of `bytes` over these ranks.
/// @param segment_bytes  what is sent at once
bool is_possible(Algorithm algorithm, size_t bytes, const HostLayout& layout, size_t segment_bytes);

/// The time that the model predicts for an algorithm.
double predicted_seconds(const CostModel& model, Algorithm algorithm, size_t bytes,
                         const HostLayout& layout);

/// The algorithm that the model predicts to be fastest, of those for which `may_run` holds; among
/// equals, the last; the ring if there is none. A function of the arguments alone, so all ranks
/// choose alike.
template <class MayRun>
Algorithm fastest(const CostModel& model, size_t bytes, const HostLayout& layout,
                  const MayRun& may_run) {
  Algorithm best = Algorithm::kRing;
  double least = std::numeric_limits<double>::infinity();
  for (const AllreduceAlgorithm* its : algorithms()) {
    if (!may_run(*its)) continue;
    const double seconds = predicted_seconds(model, its->id, bytes, layout);
    if (seconds > least) continue;
    least = seconds;
    best = its->id;
  }
  return best;
}

/// Of those that are possible.
Algorithm choose_allreduce(const CostModel& model, size_t bytes, const HostLayout& layout,
                           size_t segment_bytes);

}  // namespace ringdl

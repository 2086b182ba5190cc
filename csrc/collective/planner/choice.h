#pragma once

#include <cstddef>
#include <vector>

#include "collective/algorithm.h"
#include "collective/host_layout.h"

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

/// The possible algorithm that the model predicts to be fastest; among equals, the last. A function
/// of the arguments alone, so all ranks choose alike.
Algorithm choose_allreduce(const CostModel& model, size_t bytes, const HostLayout& layout,
                           size_t segment_bytes);

}  // namespace ringdl

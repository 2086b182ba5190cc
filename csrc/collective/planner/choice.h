#pragma once

#include <cstddef>
#include <vector>

#include "collective/algorithm.h"
#include "collective/host_layout.h"

namespace ringdl {

/// What allreduces cost here, as far as it is needed to choose one: a straight line per algorithm,
/// by its id (Hockney 1994).
struct CostModel {
  std::vector<Cost> inside;   // a host
  std::vector<Cost> between;  // several
};

/// What is built in. `python -m ringdl tune` finds what is right elsewhere.
CostModel default_costs();

/// Whether an algorithm can be chosen for so many bytes over these ranks.
/// @param segment_bytes  what travels at once
bool is_possible(Algorithm algorithm, size_t bytes, const HostLayout& layout, size_t segment_bytes);

/// What the model says that an algorithm takes.
double predicted_seconds(const CostModel& model, Algorithm algorithm, size_t bytes,
                         const HostLayout& layout);

/// The possible algorithm that the model says is fastest; of several, the last. A function of the
/// arguments alone, so all ranks choose alike.
Algorithm choose_allreduce(const CostModel& model, size_t bytes, const HostLayout& layout,
                           size_t segment_bytes);

}  // namespace ringdl

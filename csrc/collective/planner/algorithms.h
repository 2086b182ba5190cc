#pragma once

#include <span>
#include <string_view>

#include "collective/algorithm.h"

namespace ringdl {

/// All algorithms of allreduce, by their ids: what bindings, settings, the doctor, the benchmark
/// and tune read. A new one is a state machine with its AllreduceAlgorithm, an id, and a line here.
std::span<const AllreduceAlgorithm* const> algorithms();

const AllreduceAlgorithm& algorithm_of(Algorithm id);
std::string_view name_of(Algorithm id);

}  // namespace ringdl

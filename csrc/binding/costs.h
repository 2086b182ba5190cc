#pragma once

#include <array>
#include <vector>

#include "collective/planner/algorithms.h"
#include "collective/planner/choice.h"

namespace ringdl::binding {

/// A cost model in Python's form: inside a host and between hosts, by Algorithm, the seconds per
/// step and per byte.
using CostLines = std::array<std::vector<std::array<double, 2>>, 2>;

inline CostModel model_of(const CostLines& lines) {
  CostModel model;
  for (const auto& [step, byte] : lines[0]) model.inside.push_back({step, byte});
  for (const auto& [step, byte] : lines[1]) model.between.push_back({step, byte});
  model.inside.resize(algorithms().size());
  model.between.resize(algorithms().size());
  return model;
}

inline CostLines lines_of(const CostModel& model) {
  CostLines lines;
  for (const Cost& cost : model.inside) lines[0].push_back({cost.step_seconds, cost.byte_seconds});
  for (const Cost& cost : model.between) lines[1].push_back({cost.step_seconds, cost.byte_seconds});
  return lines;
}

}  // namespace ringdl::binding

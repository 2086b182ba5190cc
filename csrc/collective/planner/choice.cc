#include "collective/planner/choice.h"

namespace ringdl {

CostModel default_costs() {
  CostModel model;
  for (const AllreduceAlgorithm* algorithm : algorithms()) {
    model.inside.push_back(algorithm->inside);
    model.between.push_back(algorithm->between);
  }
  return model;
}

bool is_possible(Algorithm algorithm, size_t bytes, const HostLayout& layout,
                 size_t segment_bytes) {
  const AllreduceAlgorithm& its = algorithm_of(algorithm);
  return its.most_bytes != nullptr && bytes <= its.most_bytes(segment_bytes) && its.can_run(layout);
}

double predicted_seconds(const CostModel& model, Algorithm algorithm, size_t bytes,
                         const HostLayout& layout) {
  const auto& costs = layout.host_count() == 1 ? model.inside : model.between;
  const Cost& cost = costs[static_cast<size_t>(algorithm)];
  const Effort effort = algorithm_of(algorithm).effort(static_cast<double>(bytes), layout);
  return effort.steps * cost.step_seconds + effort.bytes_moved * cost.byte_seconds;
}

Algorithm choose_allreduce(const CostModel& model, size_t bytes, const HostLayout& layout,
                           size_t segment_bytes) {
  return fastest(model, bytes, layout, [&](const AllreduceAlgorithm& its) {
    return is_possible(its.id, bytes, layout, segment_bytes);
  });
}

}  // namespace ringdl

#include "collective/choice.h"

#include <algorithm>
#include <bit>

namespace ringdl {
namespace {

constexpr double kUs = 1e-6;
constexpr double kNs = 1e-9;

}  // namespace

// Doubling takes a step more at each end if the ranks are no power of two.
Effort effort_of(Algorithm algorithm, size_t bytes, const HostLayout& layout) {
  const double whole = static_cast<double>(bytes);
  const auto size = static_cast<unsigned>(layout.size());
  const double ranks = size;
  const double hosts = layout.host_count();
  switch (algorithm) {
    case Algorithm::kDoubling: {
      const double rounds = std::bit_width(size) - 1 + (std::has_single_bit(size) ? 0 : 2);
      return {rounds, rounds * whole};
    }
    case Algorithm::kDirect:
      return {static_cast<double>(std::bit_width(size - 1)), whole};  // to tell where arrays are
    case Algorithm::kHierarchical:
      return {1 + 2 * (hosts - 1), 2 * (hosts - 1) / hosts * whole};
    case Algorithm::kRing:
    case Algorithm::kMpi:
      break;
  }
  return {2 * (ranks - 1), 2 * (ranks - 1) / ranks * whole};
}

CostModel default_costs() {
  CostModel model{};
  auto at = [](Costs& costs, Algorithm algorithm) -> Cost& {
    return costs[static_cast<size_t>(algorithm)];
  };
  at(model.inside, Algorithm::kRing) = {12 * kUs, 0.4 * kNs};
  at(model.inside, Algorithm::kDoubling) = {12 * kUs, 0.4 * kNs};
  at(model.inside, Algorithm::kDirect) = {12 * kUs, 0.04 * kNs};
  at(model.between, Algorithm::kRing) = {30 * kUs, 8 * kNs};
  at(model.between, Algorithm::kDoubling) = {30 * kUs, 8 * kNs};
  at(model.between, Algorithm::kHierarchical) = {40 * kUs, 8 * kNs};
  return model;
}

bool is_possible(Algorithm algorithm, size_t bytes, const HostLayout& layout,
                 size_t segment_bytes) {
  switch (algorithm) {
    case Algorithm::kDoubling:
      return bytes <= std::max(kDoublingBytes, segment_bytes);
    case Algorithm::kDirect:
      return layout.host_count() == 1 && layout.size() > 1;
    case Algorithm::kHierarchical:
      return layout.host_count() > 1 && layout.host_count() < layout.size();
    case Algorithm::kRing:
      return true;
    case Algorithm::kMpi:
      break;
  }
  return false;
}

double predicted_seconds(const CostModel& model, Algorithm algorithm, size_t bytes,
                         const HostLayout& layout) {
  const Costs& costs = layout.host_count() == 1 ? model.inside : model.between;
  const Cost& cost = costs[static_cast<size_t>(algorithm)];
  const Effort effort = effort_of(algorithm, bytes, layout);
  return effort.steps * cost.step_seconds + effort.bytes_moved * cost.byte_seconds;
}

Algorithm choose_allreduce(const CostModel& model, size_t bytes, const HostLayout& layout,
                           size_t segment_bytes) {
  Algorithm best = Algorithm::kRing;
  double least = predicted_seconds(model, best, bytes, layout);
  for (const Algorithm other :
       {Algorithm::kDoubling, Algorithm::kDirect, Algorithm::kHierarchical}) {
    if (!is_possible(other, bytes, layout, segment_bytes)) continue;
    const double seconds = predicted_seconds(model, other, bytes, layout);
    if (seconds <= least) {
      least = seconds;
      best = other;
    }
  }
  return best;
}

}  // namespace ringdl

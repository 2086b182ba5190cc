#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "collective/host_layout.h"

namespace ringdl {

/// How an allreduce is computed. The values travel in headers, so they never change.
enum class Algorithm : uint8_t {
  kRing = 0,
  kDoubling = 1,
  kMpi = 2,
  kDirect = 3,
  kHierarchical = 4
};

inline constexpr size_t kAlgorithms = 5;

constexpr std::string_view name_of(Algorithm algorithm) {
  constexpr std::string_view names[] = {"ring", "doubling", "mpi", "direct", "hierarchical"};
  return names[static_cast<int>(algorithm)];
}

/// Recursive doubling, and Bruck's allgather, send so many bytes as one message, however short
/// segments are.
inline constexpr size_t kDoublingBytes = 16 << 10;

/// What an algorithm takes: for a step, in which a rank waits for another, and for a byte that
/// passes through a rank.
struct Cost {
  double step_seconds;
  double byte_seconds;
};

/// The costs by algorithm. Those of MPI's own allreduce, which is never chosen, are not looked at.
using Costs = std::array<Cost, kAlgorithms>;

/// What allreduces cost here, as far as it is needed to choose one: a straight line per algorithm.
struct CostModel {
  Costs inside;   // a host
  Costs between;  // several
};

/// Measured on two cores of an AMD EPYC, and on simulated hosts with links of 1 Gbit/s.
/// `python -m ringdl tune` finds what is right elsewhere.
CostModel default_costs();

/// Whether an algorithm can reduce so many bytes over these ranks; recursive doubling, which sends
/// arrays whole, is only thought of for those that are one message.
/// @param segment_bytes  what travels at once
bool is_possible(Algorithm algorithm, size_t bytes, const HostLayout& layout, size_t segment_bytes);

/// What an algorithm has to do: steps that follow one another, and bytes that pass through the
/// busiest rank or, between hosts, through the busiest link.
struct Effort {
  double steps;
  double bytes_moved;
};

Effort effort_of(Algorithm algorithm, size_t bytes, const HostLayout& layout);

/// What the model says that an algorithm takes.
double predicted_seconds(const CostModel& model, Algorithm algorithm, size_t bytes,
                         const HostLayout& layout);

/// The possible algorithm that the model says is fastest. A function of the arguments alone, so all
/// ranks choose alike.
Algorithm choose_allreduce(const CostModel& model, size_t bytes, const HostLayout& layout,
                           size_t segment_bytes);

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "collective/algorithm.h"
#include "collective/planner/choice.h"
#include "simulation/executor.h"
#include "transport/simulated/links.h"

namespace ringdl {

/// A cluster that need not exist.
struct ImaginedCluster {
  std::vector<int> hosts;  // the number of each rank's host, from 0 on
  /// As those of Links, like the next two.
  SimulatedLink link;
  SimulatedLink memory{8e9, kMicrosecond};
  int64_t message_ns = 500;
  /// Longer messages are announced first, and answered: they take three latencies.
  size_t eager_bytes = 64 << 10;
  SimulatedProcessor processor;
  size_t segment_bytes = 32 << 10;
  /// Whether ranks of a host use one another's memory, as buckets and what ringdl.empty() makes do.
  bool shares_memory = true;
};

/// What allreduces cost there between hosts, as far as needed to choose one: their steps take a
/// latency, and their bytes pass a link. Inside a host, the built-in costs.
CostModel costs_of(const ImaginedCluster& cluster);

/// An array of float32, and when all ranks have it.
struct ReadyArray {
  size_t bytes;
  int64_t ready_ns = 0;
};

struct Prediction {
  double seconds;            // from 0 until the last rank has the last sum
  double busiest_seconds;    // that the busiest rank's processor computes and handles messages
  uint64_t most_link_bytes;  // that a host's link carries away from it
  uint64_t messages;         // of all ranks, with announcements of long ones
  std::vector<Algorithm> algorithms;  // by array
};

/// Simulates allreduces, without the numbers themselves: the engines of all ranks, in one thread.
///
/// Nothing else than these uses the processors: gradients are computed on others.
/// @param wanted  null: by costs_of()
/// @param interrupted  called now and then; may throw
/// @throws UsageError  there is no array, or the algorithm is not for these ranks
/// @throws Error  it takes longer than a day
Prediction predict_allreduces(const ImaginedCluster& cluster, std::span<const ReadyArray> arrays,
                              std::optional<Algorithm> wanted,
                              const std::function<void()>& interrupted = {});

}  // namespace ringdl

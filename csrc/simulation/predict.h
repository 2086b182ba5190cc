#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "collective/algorithm.h"
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
  SimulatedProcessor processor;
  size_t segment_bytes = 32 << 10;
  /// Whether ranks of a host use one another's memory, as buckets and what ringdl.empty() makes do.
  bool shares_memory = true;
};

struct Prediction {
  double seconds;            // until the last rank has it
  uint64_t most_link_bytes;  // that a host's link carries away from it
  uint64_t messages;         // of all ranks
  Algorithm algorithm;
};

/// Simulates an allreduce of float32, without the numbers themselves: the engines of all ranks, in
/// one thread.
///
/// @param wanted  null: the one that the built-in costs choose
/// @param interrupted  called now and then; may throw
/// @throws UsageError  the algorithm is not for these ranks
Prediction predict_allreduce(const ImaginedCluster& cluster, size_t bytes,
                             std::optional<Algorithm> wanted,
                             const std::function<void()>& interrupted = {});

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace ringdl {

struct LoopbackOptions {
  /// Messages of at most this many bytes are copied when sent, longer ones when received.
  size_t eager_bytes = 4096;
  /// If not 0: seeds random delays. A poll then often finds nothing although something has ended.
  uint64_t delay_seed = 0;
};

/// A communicator whose ranks are threads of this process, for tests and sanitizers; and, with size
/// 1, for a process that was started alone. One transport per rank; they share what they need.
std::vector<std::unique_ptr<Transport>> make_loopback(int size, LoopbackOptions options = {});

}  // namespace ringdl

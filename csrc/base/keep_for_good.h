#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ringdl {

/// Keeps memory for as long as the process lives: what sends that nobody will receive are made
/// from, as MPI may read it until then. Any thread.
inline void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard guard(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace ringdl

#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ringdl {

/// Keeps memory until the process ends: the buffers of sends that nobody will receive, as MPI may
/// read them until then. Any thread.
inline void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard guard(mutex);
  kept->push_back(std::move(memory));
}

/// Keeps memory until sixteen more pieces were kept so: stages of works that have failed here,
/// which ranks of this host that do not know yet may still read, to no effect. Any thread.
inline void keep_for_a_while(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::deque<std::shared_ptr<const void>>;
  const std::lock_guard guard(mutex);
  kept->push_back(std::move(memory));
  if (kept->size() > 16) kept->pop_front();
}

}  // namespace ringdl

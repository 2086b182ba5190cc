#pragma once

#include <atomic>
#include <cstdint>

#include "transport/window.h"

namespace ringdl {

/// A lock in memory that several processes see; all zeros is free. It is held while a block is read
/// or changed, for some 50 us. Nobody waits in it: a rank that does not get it asks again.
///
/// Threads: any.
class BlockLock {
 public:
  /// Takes it for a rank, if it is free or its holder's process has ended.
  /// @param window  says which ranks have ended; null if that is not asked
  bool try_take(int rank, const Window* window) {
    const auto mark = static_cast<uint32_t>(rank + 1);
    uint32_t holder = holder_.load(std::memory_order_relaxed);
    if (holder != 0 && (!window || !window->has_ended(static_cast<int>(holder - 1)))) return false;
    return holder_.compare_exchange_strong(holder, mark, std::memory_order_acquire);
  }
  void give_back() { holder_.store(0, std::memory_order_release); }
  /// Of a lock that is held; -1 if it is free.
  int holder() const { return static_cast<int>(holder_.load(std::memory_order_relaxed)) - 1; }

 private:
  std::atomic<uint32_t> holder_;  // the rank + 1
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
};

}  // namespace ringdl

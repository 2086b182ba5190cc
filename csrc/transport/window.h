#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "transport/store_trial.h"

namespace ringdl {

/// Memory of this rank that the other ranks of its host see, and theirs. A place there is named by
/// its owner and its offset.
///
/// Threads: any.
class Window {
 public:
  /// Allocations begin at a multiple of this: a cache line, and the widest vector.
  static constexpr uint64_t kAlignment = 64;

  virtual ~Window() = default;

  /// Whether this process sees the memory of a rank; true for its own.
  virtual bool reaches(int rank) const = 0;

  /// Whether the process of a rank that is reached is known to have ended.
  virtual bool has_ended(int rank) const = 0;

  /// What lies at `offset` in the memory of a rank that is reached, as this process sees it.
  virtual std::byte* at(int rank, uint64_t offset) const = 0;

  /// Where `data` is in this rank's memory; nothing if it is elsewhere, or only partly there.
  virtual std::optional<uint64_t> offset_of(const void* data, size_t bytes) const = 0;

  /// Memory for an array of this rank, of any content; null if no more is left. It stays valid
  /// after the window is gone.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) = 0;

  /// Memory that lives as long as a call: stages, and the counters that ranks meet by. Kept apart
  /// from arrays, so these leave room for it.
  /// @throws OutOfMemory
  virtual std::shared_ptr<std::byte> allocate_stage(size_t bytes) = 0;

  /// Keeps an allocation until a counter that other ranks increment has reached a value. The
  /// counter lies in that memory.
  virtual void free_once(std::shared_ptr<std::byte> memory, const std::atomic<uint64_t>& counter,
                         uint64_t value) = 0;

  /// How this rank best stores what others read soon.
  StoreTrial& store_trial() { return store_trial_; }

 private:
  StoreTrial store_trial_;
};

}  // namespace ringdl

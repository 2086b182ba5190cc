#pragma once

#include <cstdint>

namespace ringdl {

/// How a thread that waits spends its time between two looks: it spins for a moment (unless ranks
/// have to share cores), yields for a millisecond, then sleeps longer and longer.
///
/// A sleep is a sixteenth of the time waited so far, so it adds little to what was waited for
/// anyway, and at most 2 ms: then a look every 2 ms costs well under 1% of a core.
class Backoff {
 public:
  /// @param may_spin  every rank of this host can have a core of its own
  explicit Backoff(bool may_spin) : may_spin_(may_spin) {}

  /// Something happened: the next answer may be near.
  void reset() { since_ns_ = 0; }

  /// Spins, yields or sleeps once. Call without holding a lock.
  void pause();

 private:
  bool may_spin_;
  int64_t since_ns_ = 0;
};

/// Sleeps at least `ns` nanoseconds.
void sleep_ns(int64_t ns);

}  // namespace ringdl

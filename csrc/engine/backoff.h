#pragma once

#include <cstdint>

namespace ringdl {

/// How a thread that waits spends its time between two polls: it spins for a moment (unless ranks
/// have to share cores), yields for a while, then sleeps longer and longer.
///
/// It yields for a millisecond, and for less and less if waits are usually longer than that: a
/// thread that waits for one segment after the other on a slow link would else spend half its time
/// in yields, while threads that still compute, or TCP, may want the core.
///
/// A sleep is a sixteenth of the time waited so far, so it adds little to the wait, and at most 2
/// ms: a poll every 2 ms costs well under 1% of a core.
class Backoff {
 public:
  /// @param may_spin  every rank of this host can have a core of its own
  explicit Backoff(bool may_spin);

  /// Something happened: the next answer may be near.
  void reset();

  /// Spins, yields or sleeps once. Call without holding a lock.
  void pause();

  /// Of the next wait.
  int64_t yields_ns() const { return yields_ns_; }

 private:
  bool may_spin_;
  int64_t since_ns_ = 0;
  int64_t yields_ns_;
};

/// How long the next wait yields, after one that yielded for `yields_ns` and took `waited_ns`: half
/// as long if that was in vain, and twice as long if more yields would have met the answer.
int64_t yields_after(int64_t yields_ns, int64_t waited_ns);

/// Sleeps at least `ns` nanoseconds.
void sleep_ns(int64_t ns);

}  // namespace ringdl

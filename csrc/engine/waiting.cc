#include "engine/waiting.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "base/clock.h"

namespace ringdl {
namespace {

// A message between two ranks of one host takes about 1 us, one over a network 10 to 50 us.
constexpr int64_t kSpinNs = 50 * kMicrosecond;

// On shared cores the peer needs the core to answer: yield to it, but not for ever, as a yield
// among sleepers is a spin.
constexpr int64_t kYieldNs = 200 * kMicrosecond;

constexpr int64_t kLongestSleepNs = 2 * kMillisecond;

}  // namespace

void sleep_ns(int64_t ns) {
  const timespec duration{ns / kSecond, ns % kSecond};
  nanosleep(&duration, nullptr);
}

void Backoff::pause() {
  const int64_t now = now_ns();
  if (since_ns_ == 0) since_ns_ = now;
  const int64_t waited = now - since_ns_;
  if (may_spin_ && waited < kSpinNs) return;
  if (waited < kYieldNs) {
    sched_yield();
  } else {
    sleep_ns(std::min(waited / 16, kLongestSleepNs));
  }
}

}  // namespace ringdl

#include "engine/backoff.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "base/clock.h"

namespace ringdl {
namespace {

// Between two ranks of one host an answer takes about a microsecond. For longer, a yield is as
// quick if nobody else wants the core; if somebody does, it may be the awaited rank.
constexpr int64_t kSpinNs = 5 * kMicrosecond;

// Not for ever, as a yield among sleepers is a spin. A sleep takes 0.1 ms more than requested.
constexpr int64_t kLongestYieldsNs = 1000 * kMicrosecond;
constexpr int64_t kShortestYieldsNs = 50 * kMicrosecond;

// A millisecond of yields would be up to half of such a wait.
constexpr int64_t kLongNs = 2 * kMillisecond;

constexpr int64_t kLongestSleepNs = 2 * kMillisecond;

}  // namespace

void sleep_ns(int64_t ns) {
  const timespec duration{ns / kSecond, ns % kSecond};
  nanosleep(&duration, nullptr);
}

int64_t yields_after(int64_t yields_ns, int64_t waited_ns) {
  if (waited_ns >= kLongNs) return std::max(yields_ns / 2, kShortestYieldsNs);
  if (waited_ns < yields_ns || waited_ns >= kLongestYieldsNs) return yields_ns;
  return std::min(2 * yields_ns, kLongestYieldsNs);
}

Backoff::Backoff(bool may_spin) : may_spin_(may_spin), yields_ns_(kLongestYieldsNs) {}

void Backoff::reset() {
  if (since_ns_ != 0) yields_ns_ = yields_after(yields_ns_, now_ns() - since_ns_);
  since_ns_ = 0;
}

void Backoff::pause() {
  const int64_t now = now_ns();
  if (since_ns_ == 0) since_ns_ = now;
  const int64_t waited = now - since_ns_;
  if (may_spin_ && waited < kSpinNs) return;
  if (waited < yields_ns_) {
    sched_yield();
  } else {
    sleep_ns(std::min(waited / 16, kLongestSleepNs));
  }
}

}  // namespace ringdl

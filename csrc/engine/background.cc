// The progress thread of a driver: it moves works while nobody waits.

#include <algorithm>
#include <chrono>

#include "engine/backoff.h"
#include "engine/driver.h"

namespace ringdl {
namespace {

// It sleeps this many times the CPU time of a poll that moves nothing, so it never takes more than
// 3% of a core from threads that compute, beyond what moving bytes takes.
constexpr int64_t kSleepPerPoll = 32;
constexpr int64_t kShortestSleepNs = 50 * kMicrosecond;
constexpr int64_t kLongestSleepNs = 2 * kMillisecond;

// A poll that takes this many times as long as one that moves nothing has moved bytes, even if no
// message has ended.
constexpr int64_t kMovingPolls = 4;

// Waiting threads poll for themselves, at least every 2 ms, and a second poll would only keep them
// from the lock. Unless they have not for this long: a signal handler may be running.
constexpr int64_t kWaiterIsAwayNs = 10 * kMillisecond;

// Without works in flight: often enough to answer a rank that asks why nothing moves.
constexpr auto kIdleSleep = std::chrono::milliseconds(100);

}  // namespace

void Driver::progress_in_background() {
  Lock lock(mutex_);
  int64_t pause = 0;
  int fruitless = 0;
  int64_t idle_poll = kMillisecond;  // CPU time of one that moves nothing: the recent least
  while (!stopping_) {
    if (waiters_ > 0 && now_ns() - waiter_polled_ns_ < kWaiterIsAwayNs) {
      lock.unlock();
      sleep_ns(kLongestSleepNs);
      lock.lock();
      continue;
    }
    const int64_t begin = thread_cpu_ns();
    int moved = 0;
    try {
      moved = engine_.poll();
      watch_over(now_ns());
    } catch (const std::exception& error) {
      broken_ = error.what();
      return;
    }
    const int64_t used = thread_cpu_ns() - begin;
    idle_poll = std::min(used, idle_poll + idle_poll / 256 + 1);
    fruitless = moved > 0 ? 0 : fruitless + 1;
    if (!engine_.is_busy() && fruitless >= Inbox::kQuietPolls) {
      wake_.wait_for(lock, kIdleSleep, [this] { return stopping_ || awake_; });
      awake_ = false;
      pause = 0;
      fruitless = 0;
      continue;
    }
    if (fruitless < Inbox::kQuietPolls) {
      pause = 0;  // and no yield: beside a thread that computes, it costs a time slice
      lock.unlock();
    } else {
      const int64_t least = std::max(kShortestSleepNs, kSleepPerPoll * idle_poll);
      if (used > kMovingPolls * idle_poll) pause = 0;
      pause = std::clamp(2 * pause, least, std::max(least, kLongestSleepNs));
      lock.unlock();
      sleep_ns(pause);
    }
    lock.lock();
  }
}

}  // namespace ringdl

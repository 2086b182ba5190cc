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

// A wake-up takes some 20 us from the thread that launches, if both share a core: many times what a
// small work takes that ends without this thread. So if this one was woken in vain, and again so
// soon, it sleeps before it polls, longer each time.
constexpr int64_t kSoonNs = 500 * kMicrosecond;

}  // namespace

void Driver::progress_in_background() {
  Lock lock(mutex_);
  int64_t pause = 0;
  int64_t rest = 0;
  int fruitless = 0;
  bool was_of_use = true;            // since it was woken last
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
      const int64_t now = now_ns();
      watch_over(now);
      engine_.find_failed_ranks(now);  // callers may ask whether a work has ended, and never wait
    } catch (const std::exception& error) {
      broken_ = error.what();
      return;
    }
    const int64_t used = thread_cpu_ns() - begin;
    idle_poll = std::min(used, idle_poll + idle_poll / 256 + 1);
    fruitless = moved > 0 ? 0 : fruitless + 1;
    was_of_use |= moved > 0;
    if (!engine_.is_busy() && fruitless >= Inbox::kQuietPolls) {
      const int64_t idle_since = now_ns();
      wake_.wait_for(lock, kIdleSleep, [this] { return stopping_ || awake_; });
      awake_ = false;
      const bool is_in_vain = !was_of_use && now_ns() - idle_since < kSoonNs;
      rest = is_in_vain ? std::clamp(2 * rest, kShortestSleepNs, kLongestSleepNs) : 0;
      pause = 0;
      fruitless = 0;
      was_of_use = false;
      if (is_in_vain && !stopping_) {
        lock.unlock();
        sleep_ns(rest);
        lock.lock();
      }
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

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"

namespace ringdl {
namespace {

// The background thread sleeps so many times the CPU time that a look which finds nothing takes, so
// it never takes more than 3% of a core from those who compute, beside what moving bytes takes.
constexpr int64_t kSleepPerLook = 32;
constexpr int64_t kShortestSleepNs = 50 * kMicrosecond;
constexpr int64_t kLongestSleepNs = 2 * kMillisecond;

// A look that takes so many times as long as one that finds nothing has moved bytes, though no
// message may have ended.
constexpr int64_t kMovingLooks = 4;

// Those who wait look for themselves, at least every 2 ms, and a second look would only keep them
// from the lock. Unless they have not for so long: a signal handler may be at work.
constexpr int64_t kWaiterIsAwayNs = 10 * kMillisecond;

// Without works in flight: often enough to answer a rank that asks why nothing moves.
constexpr auto kIdleSleep = std::chrono::milliseconds(100);

std::atomic<int> dump_requests = 0;

}  // namespace

void request_dumps() { dump_requests.fetch_add(1, std::memory_order_relaxed); }

int Engine::progress() {
  ++polls_;
  const int messages = transport_->poll();
  quiet_polls_ = messages > 0 ? 0 : std::min(quiet_polls_ + 1, kQuietPolls);
  const int answered = joining_ ? answer_calls() : 0;
  const int moved = settle() + step_any_receives();
  if (!queries_.empty() && !answers_later()) {
    for (const auto& query : std::exchange(queries_, {})) diagnosis_->on_query(query);
  }
  return messages + answered + moved;
}

// Who asks concludes from what is missing, and where a message is awaited from any rank, its header
// may come after the question.
bool Engine::answers_later() const { return !any_receives_.empty() && quiet_polls_ < kQuietPolls; }

void Engine::watch_over(int64_t now) {
  const bool may_know_of_calls =  // as in answer_calls()
      (!joining_ || quiet_polls_ >= kQuietPolls) && !answers_later();
  if (rank_ == 0 && may_know_of_calls) diagnosis_->look_for_the_stuck(now);
  diagnosis_->look_at_counts(now);
  departures_->look(now);
  std::string text = watchdog_->look(in_flight_, now);
  const int requests = dump_requests.load(std::memory_order_relaxed);
  const bool is_asked = std::exchange(dumps_done_, requests) != requests;
  if ((watchdog_->take_alarm() && watchdog_dumps_) || is_asked) text += dump();
  if (!text.empty()) std::fputs(text.c_str(), stderr);
}

std::string Engine::dump() const {
  std::vector<const Work*> works;
  for (const auto& [key, work] : in_flight_) works.push_back(work.get());
  std::sort(works.begin(), works.end(), [](auto* a, auto* b) { return a->id < b->id; });
  const int64_t now = now_ns();
  const std::string me = "ringdl: rank " + std::to_string(rank_);
  std::string text = me + ": " + std::to_string(works.size()) + " works in flight\n";
  for (const Work* work : works) {
    text += me + ": " + work->label() + ", " +
            std::to_string((now - work->begin_ns) / kMillisecond) +
            " ms: " + work->collective->describe() + "\n";
  }
  return text;
}

bool Engine::busy() const {
  return !in_flight_.empty() || keyed_work_is_leaving() || !drains_.empty() || !control_->idle();
}

void Engine::progress_in_background() {
  Lock lock(mutex_);
  int64_t pause = 0;
  int fruitless = 0;
  int64_t idle_look = kMillisecond;  // CPU time of one that finds nothing: the least of late
  while (!stopping_) {
    if (waiters_ > 0 && now_ns() - waiter_looked_ns_ < kWaiterIsAwayNs) {
      lock.unlock();
      sleep_ns(kLongestSleepNs);
      lock.lock();
      continue;
    }
    const int64_t begin = thread_cpu_ns();
    int moved = 0;
    try {
      moved = progress();
      watch_over(now_ns());
    } catch (const std::exception& error) {
      broken_ = error.what();
      return;
    }
    const int64_t used = thread_cpu_ns() - begin;
    idle_look = std::min(used, idle_look + idle_look / 256 + 1);
    fruitless = moved > 0 ? 0 : fruitless + 1;
    if (!busy() && fruitless >= kQuietPolls) {
      wake_.wait_for(lock, kIdleSleep, [this] { return stopping_ || awake_; });
      awake_ = false;
      pause = 0;
      fruitless = 0;
      continue;
    }
    if (fruitless < kQuietPolls) {
      pause = 0;  // and no yield: beside a thread that computes, it costs a time slice
      lock.unlock();
    } else {
      const int64_t least = std::max(kShortestSleepNs, kSleepPerLook * idle_look);
      if (used > kMovingLooks * idle_look) pause = 0;
      pause = std::clamp(2 * pause, least, std::max(least, kLongestSleepNs));
      lock.unlock();
      sleep_ns(pause);
    }
    lock.lock();
  }
}

}  // namespace ringdl

// How callers wait: for one work, in join() for the other ranks, or in shutdown() for all works and
// ranks.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "engine/backoff.h"
#include "engine/driver.h"

namespace ringdl {
namespace {

constexpr int64_t kInterruptNs = 100 * kMillisecond;
constexpr int64_t kDiagnoseAfterNs = 100 * kMillisecond;
constexpr int64_t kBriefNs = 10 * kMillisecond;

// How long before its deadline a wait begins to count the ranks that have arrived.
int64_t count_within(int64_t timeout_ns) { return std::min(kSecond, timeout_ns / 4 * 3); }

}  // namespace

// What a waiting thread has reported to the diagnosis, taken back at the end of its wait.
class Driver::Watch {
 public:
  Watch(Driver& driver, Lock& lock, bool for_good)
      : driver_(driver),
        diagnosis_(driver.engine_.parts().diagnosis),
        recorder_(driver.engine_.parts().works.recorder()),
        lock_(lock),
        for_good_(for_good) {}
  ~Watch() {
    if (!lock_.owns_lock()) lock_.lock();
    watch(nullptr, now_ns());
    diagnosis_.forget(question_);
  }

  // The work that is waited for now; null if there is none.
  void watch(const Work* work, int64_t now) {
    if (watched_ && work != nullptr && *watched_ == work->key) {
      diagnosis_.check(*watched_, driver_.may_submit(), now);
      return;
    }
    if (watched_) {
      diagnosis_.wait_ends(*watched_, now);
      recorder_.wait_ends(flight_);
    }
    watched_.reset();
    if (work == nullptr) return;
    watched_ = work->key;
    flight_ = work->flight;
    recorder_.wait_begins(flight_, now);
    diagnosis_.wait_begins(work->key, work->label(), work->group, for_good_, now);
  }

  void ask_all(const Work& work, int64_t within, int64_t now) {
    if (question_ == 0) question_ = diagnosis_.ask_all(work.key, work.group, within, now);
  }
  void forget_answers() { diagnosis_.forget(std::exchange(question_, 0)); }
  std::string answers(int64_t now) const { return diagnosis_.answers(question_, now); }

 private:
  Driver& driver_;
  Diagnosis& diagnosis_;
  FlightRecorder& recorder_;
  Lock& lock_;
  const bool for_good_;
  std::optional<Key> watched_;
  uint64_t flight_ = 0;  // of the same work
  uint32_t question_ = 0;
};

// Moves works until `done` is true; `check` is called after each poll that leaves it false. The
// lock is held except while the thread pauses; then another thread, or a signal handler in this
// one, may shut the engine down.
void Driver::progress_until(Lock& lock, const std::function<void()>& interrupted,
                            const std::function<bool()>& done,
                            const std::function<void(int64_t)>& check) {
  Backoff backoff(may_spin_);
  int64_t now = now_ns();
  int64_t next_interrupt = now + kInterruptNs;
  ++waiters_;
  struct Leave {
    Driver& driver;
    Lock& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      --driver.waiters_;
    }
  } leave{*this, lock};
  while (!done()) {
    refuse_closed();
    waiter_polled_ns_ = now;
    if (engine_.poll() > 0) backoff.reset();
    if (done()) break;
    watch_over(now);
    engine_.find_failed_ranks(now);
    check(now);
    if (done()) break;
    lock.unlock();
    backoff.pause();
    now = now_ns();
    if (interrupted && now >= next_interrupt) {
      next_interrupt = now + kInterruptNs;
      interrupted();
    }
    lock.lock();
  }
}

// What StallError says once the time is over; else nothing.
std::string Driver::check_wait(Watch& watch, const Awaited& awaited, int64_t now) {
  const Work& work = *awaited.work;
  const int64_t deadline = awaited.begin_ns + awaited.timeout_ns;
  if (now - awaited.begin_ns >= kDiagnoseAfterNs) watch.watch(&work, now);
  if (now >= deadline - count_within(awaited.timeout_ns)) watch.ask_all(work, deadline - now, now);
  if (now < deadline || work.ended()) return {};
  std::string why = work.label() + " did not end within " + seconds_text(awaited.timeout_ns) +
                    " on rank " + std::to_string(rank()) + ": " + watch.answers(now) + " (" +
                    work.collective->describe() +
                    "). It stays in flight: do not call again but wait for the same work, or end "
                    "the job";
  engine_.parts().works.recorder().note(work.flight, why);
  return why;
}

void Driver::wait(const std::shared_ptr<Work>& work, int64_t timeout_ns,
                  const std::function<void()>& interrupted, bool for_good) {
  if (!work->ended()) {
    Lock lock = lock_for_call();
    const int64_t begin = now_ns();
    Watch watch(*this, lock, for_good);
    const auto check = [&](int64_t now) {
      const std::string why = check_wait(watch, {work, begin, timeout_ns}, now);
      if (!why.empty()) throw StallError(why);
    };
    const auto count_time = [&] {
      const int64_t end = now_ns();
      wait_ns_ += end - begin;
      Trace& trace = engine_.parts().works.trace();
      if (trace.is_on()) trace.add({0, work->label(), "", 0, begin, end, gettid()});
    };
    try {
      progress_until(lock, interrupted, [&] { return work->ended(); }, check);
    } catch (...) {
      count_time();
      throw;
    }
    count_time();
  }
  if (work->state.load(std::memory_order_acquire) == Work::State::kFailed) {
    work->failure.raise();
  }
}

std::optional<Driver::Stalled> Driver::wait_any(const std::vector<Awaited>& awaited,
                                                uint64_t seen) {
  Lock lock = lock_for_call();
  std::deque<Watch> watches;
  for (size_t i = 0; i < awaited.size(); ++i) watches.emplace_back(*this, lock, false);
  std::optional<Stalled> stalled;
  const auto done = [&] {
    return stalled || notifications() != seen ||
           std::any_of(awaited.begin(), awaited.end(),
                       [](const Awaited& one) { return one.work->ended(); });
  };
  const auto check = [&](int64_t now) {
    for (size_t i = 0; i < awaited.size() && !stalled; ++i) {
      std::string why = check_wait(watches[i], awaited[i], now);
      if (!why.empty()) stalled = Stalled{i, std::move(why)};
    }
  };
  progress_until(lock, {}, done, check);
  return stalled;
}

bool Driver::wait_briefly(const std::shared_ptr<Work>& work) {
  if (!work->ended()) {
    Lock lock(mutex_);  // it was just submitted here; another thread may shut down
    const int64_t begin = now_ns();
    bool is_over = false;
    progress_until(
        lock, {}, [&] { return work->ended() || is_over; },
        [&](int64_t now) { is_over = now - begin > kBriefNs; });
    wait_ns_ += now_ns() - begin;
  }
  return work->state.load(std::memory_order_acquire) == Work::State::kDone;
}

int Driver::join(int64_t timeout_ns, const std::function<void()>& interrupted) {
  // Gradients are zeros from now on, and the last step may still be reading them on a device.
  if (const auto& devices = engine_.parts().options.devices) devices->synchronize();
  Lock lock = lock_for_call();
  JoinSession& joining = engine_.parts().joining;
  if (!joining.is_joined()) note_submitter();
  const std::shared_ptr<JoinSession::Session> session = joining.begin();
  session->answered_ns = now_ns();
  Watch watch(*this, lock, true);
  const auto check = [&](int64_t now) {
    const Work& awaited = joining.awaited(*session);
    watch.watch(&awaited, now);
    if (session->meeting) session->meeting->begin_ns = now;  // not watched by the watchdog
    const int64_t deadline = session->answered_ns + timeout_ns;
    if (now < deadline - count_within(timeout_ns)) {
      watch.forget_answers();
    } else {
      watch.ask_all(awaited, deadline - now, now);
    }
    if (now < deadline || awaited.ended()) return;
    throw StallError("join() waits on rank " + std::to_string(rank()) + " for " + awaited.label() +
                     ", and nothing else was called on any rank for " + seconds_text(timeout_ns) +
                     ": " + watch.answers(now) +
                     ". It goes on to answer the others: call join() again, or end the job");
  };
  progress_until(lock, interrupted, [&] { return joining.is_over(*session); }, check);
  engine_.end_join(session);
  if (session->meeting->failure) session->meeting->failure.raise();
  return static_cast<int>(session->entry[0] % size());
}

// The works in flight end, and the messages of failed ones are taken or leave: their receivers have
// been notified of the failure and take what is on its way.
void Driver::finish_works(Lock& lock, const std::function<void()>& interrupted) {
  WorkTable& works = engine_.parts().works;
  {
    Watch watch(*this, lock, true);
    const auto check = [&](int64_t now) {
      watch.watch(works.is_empty() ? nullptr : works.in_flight().begin()->second.get(), now);
    };
    progress_until(lock, interrupted, [&] { return works.is_empty(); }, check);
  }
  engine_.parts().buckets.clear();
  progress_until(
      lock, interrupted, [&] { return works.is_drained(); },
      [this](int64_t now) {
        engine_.parts().membership.refuse_failed();
        warn_of_shutdown("the messages of works that failed", now);
      });
}

// One that others might write to is kept, and not stepped any more: so is its buffer.
void Driver::give_up(const std::shared_ptr<Work>& work, const std::string& why) {
  constexpr int64_t kPatience = kSecond;
  if (work->released.load()) return;
  Lock lock = lock_for_call();
  if (!work->ended()) engine_.give_up(*work, why);
  const int64_t begin = now_ns();
  progress_until(
      lock, {},
      [&] { return work->released.load() || work->is_kept.load() || now_ns() - begin > kPatience; },
      [](int64_t) {});
}

void Driver::warn_of_shutdown(const std::string& what, int64_t now) {
  const std::string awaited = what + ", on rank " + std::to_string(rank());
  std::fputs(engine_.parts().watchdog.check_shutdown(awaited, now).c_str(), stderr);
}

void Driver::shutdown(const std::function<void()>& interrupted) {
  if (closed_.load() || in_forked_child()) return;
  Lock lock(mutex_);
  if (shutting_down_ && shuts_down_ == std::this_thread::get_id()) return;  // a signal handler
  const auto ignore = [](int64_t) {};
  while (shutting_down_) {  // another thread shuts down; if it is interrupted, this one goes on
    progress_until(lock, interrupted, [this] { return closed_.load() || !shutting_down_; }, ignore);
  }
  if (closed_.load()) return;
  engine_.parts().works.recorder().leave();
  shutting_down_ = true;
  shuts_down_ = std::this_thread::get_id();
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }  // an interrupted shutdown may be repeated
  } guard{shutting_down_};

  finish_works(lock, interrupted);
  if (const auto& devices = engine_.parts().options.devices) devices->let_go();
  const Departures& departures = engine_.parts().membership.departures();
  engine_.leave();
  // The others may need answers from this rank until they leave, too.
  progress_until(
      lock, interrupted, [this] { return engine_.have_all_left(); },
      [&](int64_t now) {
        engine_.parts().membership.refuse_failed();
        if (departures.is_over()) {
          warn_of_shutdown(engine_.parts().control->idle()
                               ? "the last messages of other ranks to leave"
                               : "its last messages to leave",
                           now);
        } else {
          std::fputs(engine_.parts().watchdog.check_shutdown(departures.awaited(), now).c_str(),
                     stderr);
        }
      });
  lock.unlock();
  stop_thread();
  lock.lock();
  if (const auto& devices = engine_.parts().options.devices) devices->close_libraries();
  engine_.close();
  engine_.parts().works.recorder().stop(true);
  closed_.store(true);
}

}  // namespace ringdl

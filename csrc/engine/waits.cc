// How callers wait: for one work, in join() for the other ranks, or in shutdown() for all works and
// ranks.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "engine/engine.h"

namespace ringdl {
namespace {

constexpr int64_t kInterruptNs = 100 * kMillisecond;
constexpr int64_t kDiagnoseAfterNs = 100 * kMillisecond;
constexpr int64_t kBriefNs = 10 * kMillisecond;
constexpr int64_t kLookAtPeersNs = kSecond / 2;
constexpr int kLooksBeforeMissed = 1;

// Likewise once this rank has left: those that hear before it that all have are gone.
constexpr int kLooksAfterLeaving = 4;

// Of a wait: from when on it has those counted that have come, before its deadline.
int64_t count_within(int64_t timeout_ns) { return std::min(kSecond, timeout_ns / 4 * 3); }

std::string seconds_text(int64_t ns) {
  return std::to_string(ns / kSecond) + "." + std::to_string(ns / (kSecond / 10) % 10) + " s";
}

}  // namespace

// What a waiting thread has told the diagnosis, taken back at the end of its wait.
class Engine::Watch {
 public:
  Watch(Engine& engine, Lock& lock, bool for_good)
      : engine_(engine), lock_(lock), for_good_(for_good) {}
  ~Watch() {
    if (!lock_.owns_lock()) lock_.lock();
    watch(nullptr, 0);
    engine_.diagnosis_->forget(question_);
  }

  // The work that is waited for now; null if there is none.
  void watch(const Work* work, int64_t now) {
    if (watched_ && work != nullptr && *watched_ == work->key) {
      engine_.diagnosis_->look(*watched_, now);
      return;
    }
    if (watched_) engine_.diagnosis_->wait_ends(*watched_);
    watched_.reset();
    if (work == nullptr) return;
    watched_ = work->key;
    engine_.diagnosis_->wait_begins(work->key, work->label(), work->group, for_good_, now);
  }

  void ask_all(const Work& work, int64_t within, int64_t now) {
    if (question_ == 0) question_ = engine_.diagnosis_->ask_all(work.key, work.group, within, now);
  }
  void forget_answers() { engine_.diagnosis_->forget(std::exchange(question_, 0)); }
  std::string answers(int64_t now) const { return engine_.diagnosis_->answers(question_, now); }

 private:
  Engine& engine_;
  Lock& lock_;
  const bool for_good_;
  std::optional<Key> watched_;
  uint32_t question_ = 0;
};

// Moves works until `done` says so; `look` is called after each look that found it not so. The lock
// is held but while the thread pauses; then the engine may be shut down by another thread, or by a
// signal handler in this one.
void Engine::progress_until(Lock& lock, const std::function<void()>& interrupted,
                            const std::function<bool()>& done,
                            const std::function<void(int64_t)>& look) {
  Backoff backoff(options_.may_spin);
  int64_t now = now_ns();
  int64_t next_interrupt = now + kInterruptNs;
  ++waiters_;
  struct Leave {
    Engine& engine;
    Lock& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      --engine.waiters_;
    }
  } leave{*this, lock};
  while (!done()) {
    refuse_closed();
    waiter_looked_ns_ = now;
    if (progress() > 0) backoff.reset();
    if (done()) break;
    watch_over(now);
    look(now);
    if (done()) break;
    look_at_peers(now);
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

// Finds ranks that are no more: at once where the transport has lost them, and else those of this
// host whose processes are gone while the launcher goes on without them, as MPICH's may after an
// exit. What these have sent may be on its way, perhaps over others: so not at the first look. Once
// this rank has left, those that know already that all have may go, lost or not.
void Engine::look_at_peers(int64_t now) {
  const auto raise = [](int rank) {
    throw RankFailedError("rank " + std::to_string(rank) +
                          " has ended without shutdown(), so what it takes part in cannot end: "
                          "find what ended its process (a crash, os._exit, too little memory) and "
                          "start the job again");
  };
  const bool is_leaving = departures_->has_left(rank_);
  const std::vector<int>& lost = transport_->lost();
  for (const int rank : lost) {
    if (!is_leaving && !departures_->has_left(rank)) raise(rank);
  }
  if ((!window_ && lost.empty()) || now < next_look_at_peers_ns_) return;
  next_look_at_peers_ns_ = now + kLookAtPeersNs;
  const int looks = is_leaving ? kLooksAfterLeaving : kLooksBeforeMissed;
  for (int rank = 0; rank < size_; ++rank) {
    if (departures_->has_left(rank)) continue;
    const bool is_gone = std::ranges::count(lost, rank) > 0 ||
                         (window_ && window_->reaches(rank) && window_->has_ended(rank));
    if (is_gone && ++missed_[rank] > looks) raise(rank);
  }
}

// What StallError says if the time is over; else nothing.
std::string Engine::look_at_wait(Watch& watch, const Awaited& awaited, int64_t now) const {
  const Work& work = *awaited.work;
  const int64_t deadline = awaited.begin_ns + awaited.timeout_ns;
  if (now - awaited.begin_ns >= kDiagnoseAfterNs) watch.watch(&work, now);
  if (now >= deadline - count_within(awaited.timeout_ns)) watch.ask_all(work, deadline - now, now);
  if (now < deadline || work.ended()) return {};
  return work.label() + " did not end within " + seconds_text(awaited.timeout_ns) + " on rank " +
         std::to_string(rank_) + ": " + watch.answers(now) + " (" + work.collective->describe() +
         "). It stays in flight: do not call again but wait for the same work, or end the job";
}

void Engine::wait(const std::shared_ptr<Work>& work, int64_t timeout_ns,
                  const std::function<void()>& interrupted, bool for_good) {
  if (!work->ended()) {
    Lock lock = lock_for_call();
    const int64_t begin = now_ns();
    Watch watch(*this, lock, for_good);
    const auto look = [&](int64_t now) {
      const std::string why = look_at_wait(watch, {work, begin, timeout_ns}, now);
      if (!why.empty()) throw StallError(why);
    };
    const auto count_time = [&] {
      const int64_t end = now_ns();
      wait_ns_ += end - begin;
      if (trace_.is_on()) trace_.add({0, work->label(), "", 0, begin, end, gettid()});
    };
    try {
      progress_until(lock, interrupted, [&] { return work->ended(); }, look);
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

std::optional<Engine::Stalled> Engine::wait_any(const std::vector<Awaited>& awaited,
                                                uint64_t seen) {
  Lock lock = lock_for_call();
  std::deque<Watch> watches;
  for (size_t i = 0; i < awaited.size(); ++i) watches.emplace_back(*this, lock, false);
  std::optional<Stalled> stalled;
  const auto done = [&] {
    return stalled || news() != seen ||
           std::any_of(awaited.begin(), awaited.end(),
                       [](const Awaited& one) { return one.work->ended(); });
  };
  const auto look = [&](int64_t now) {
    for (size_t i = 0; i < awaited.size() && !stalled; ++i) {
      std::string why = look_at_wait(watches[i], awaited[i], now);
      if (!why.empty()) stalled = Stalled{i, std::move(why)};
    }
  };
  progress_until(lock, {}, done, look);
  return stalled;
}

bool Engine::wait_briefly(const std::shared_ptr<Work>& work) {
  if (!work->ended()) {
    Lock lock(mutex_);  // of who has just submitted it; another thread may shut down meanwhile
    const int64_t begin = now_ns();
    bool is_over = false;
    progress_until(
        lock, {}, [&] { return work->ended() || is_over; },
        [&](int64_t now) { is_over = now - begin > kBriefNs; });
    wait_ns_ += now_ns() - begin;
  }
  return work->state.load(std::memory_order_acquire) == Work::State::kDone;
}

int Engine::join(int64_t timeout_ns, const std::function<void()>& interrupted) {
  Lock lock = lock_for_call();
  if (!joining_) begin_join();
  const std::shared_ptr<Joining> joining = joining_;
  joining->answered_ns = now_ns();
  Watch watch(*this, lock, true);
  const auto look = [&](int64_t now) {
    const Work& awaited = awaited_in_join(*joining);
    watch.watch(&awaited, now);
    if (joining->meeting) joining->meeting->begin_ns = now;  // no matter for the watchdog
    const int64_t deadline = joining->answered_ns + timeout_ns;
    if (now < deadline - count_within(timeout_ns)) {
      watch.forget_answers();
    } else {
      watch.ask_all(awaited, deadline - now, now);
    }
    if (now < deadline || awaited.ended()) return;
    throw StallError("join() waits on rank " + std::to_string(rank_) + " for " + awaited.label() +
                     ", and nothing else was called on any rank for " + seconds_text(timeout_ns) +
                     ": " + watch.answers(now) +
                     ". It goes on to answer the others: call join() again, or end the job");
  };
  progress_until(lock, interrupted, [&] { return all_have_joined(*joining); }, look);
  if (joining_ == joining) end_join();
  if (joining->meeting->failure) joining->meeting->failure.raise();
  return static_cast<int>(joining->entry[0] % size_);
}

void Engine::shutdown(const std::function<void()>& interrupted) {
  if (closed_.load() || in_forked_child()) return;
  Lock lock(mutex_);
  if (shutting_down_ && shuts_down_ == std::this_thread::get_id()) return;  // a signal handler
  const auto ignore = [](int64_t) {};
  while (shutting_down_) {  // another thread is at it; should it be interrupted, this one goes on
    progress_until(lock, interrupted, [this] { return closed_.load() || !shutting_down_; }, ignore);
  }
  if (closed_.load()) return;
  shutting_down_ = true;
  shuts_down_ = std::this_thread::get_id();
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }  // an interrupted shutdown may be repeated
  } guard{shutting_down_};

  {
    Watch watch(*this, lock, true);
    const auto look = [&](int64_t now) {
      watch.watch(in_flight_.empty() ? nullptr : in_flight_.begin()->second.get(), now);
    };
    progress_until(lock, interrupted, [this] { return in_flight_.empty(); }, look);
  }
  for (auto& [number, bucket] : buckets_) {
    if (bucket.prepared) bucket.prepared->bucket_channel->abort();
  }
  buckets_.clear();
  // What failed has been told to its receivers, who take what is on its way. Not so with buckets:
  // their messages may have gone to a rank that never launches them.
  const std::string here = ", on rank " + std::to_string(rank_);
  const auto tell = [this](const std::string& awaited, int64_t now) {
    std::fputs(watchdog_->look_at_shutdown(awaited, now).c_str(), stderr);
  };
  progress_until(
      lock, interrupted, [this] { return drains_.empty() && !keyed_work_is_leaving(); },
      [&](int64_t now) { tell("the messages of works that failed" + here, now); });
  departures_->leave(now_ns());
  // The others may need answers from here until they leave too.
  const auto all_have_left = [this] { return departures_->is_over() && control_->idle(); };
  progress_until(lock, interrupted, all_have_left, [&](int64_t now) {
    const bool is_sending = departures_->is_over();  // the control plane is
    tell(is_sending ? "its last messages to leave" + here : departures_->awaited(), now);
  });
  lock.unlock();
  stop_thread();
  lock.lock();
  control_->close();
  for (const auto& work : std::exchange(leaving_, {})) keep_for_good(work);
  closed_.store(true);
  groups_.clear();
  transport_.reset();
}

bool Engine::keyed_work_is_leaving() const {
  return std::any_of(leaving_.begin(), leaving_.end(),
                     [](const auto& work) { return work->keyed_channel != nullptr; });
}

// What sends that nobody will receive are made from: MPI may read it as long as the process lives.
void Engine::keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard guard(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace ringdl

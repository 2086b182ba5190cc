#include "engine/driver.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

std::atomic<bool> forked = false;
std::atomic<int> dump_requests = 0;
thread_local bool submits_for_caller = false;

// How long a blocking caller polls the slots before its call becomes an ordinary work: what a
// message takes, or, on shared cores, a few turns of the others.
constexpr int64_t kMeetSpinNs = 20 * kMicrosecond;
constexpr int64_t kMeetYieldNs = 200 * kMicrosecond;
constexpr int kPollsPerTime = 8;
constexpr int kPollsAtOnce = 64;  // about a microsecond

// Arrays up to here are reduced by such a caller under the lock; of larger ones, what a work of its
// own costs does not show. Several times what a KiB takes, as the others' cores may be taken.
constexpr size_t kMostPolledBytes = 4 << 20;
constexpr int64_t kNsPerPolledKiB = 500;

// How often a caller polls for messages that nothing here waits for, where no thread does. Not at
// each call: an MPI that yields its core when it finds none would double the time of a small one.
constexpr int64_t kStrayMessagesNs = 200 * kMicrosecond;

}  // namespace

void request_dumps() { dump_requests.fetch_add(1, std::memory_order_relaxed); }

std::shared_ptr<Driver> make_driver(std::unique_ptr<Transport> transport, EngineOptions options,
                                    bool threads) {
  return {new Driver(std::move(transport), options, threads), [](Driver* driver) {
            if (!forked.load()) delete driver;
          }};
}

Driver::Driver(std::unique_ptr<Transport> transport, EngineOptions options, bool threads)
    : engine_(std::move(transport), options, kMonotonicClock),
      threads_(threads),
      maker_(std::this_thread::get_id()) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  if (registered != 0) throw Error("pthread_atfork failed");
  if (!threads_ || size() == 1) return;
  try {
    thread_ = std::thread([this] { progress_in_background(); });
  } catch (const std::system_error& error) {
    throw Error("this process may start no thread more (" + std::string(error.what()) +
                "): raise its limits of memory or of processes (ulimit -v, ulimit -u)");
  }
}

Driver::~Driver() { stop_thread(); }

void Driver::abandon() {
  if (closed_.load() || in_forked_child()) return;
  stop_thread();
  const Lock lock(mutex_);
  engine_.close();
  engine_.parts().works.recorder().stop(false);
  closed_.store(true);
}

void Driver::stop_thread() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Driver::in_forked_child() { return forked.load(std::memory_order_relaxed); }

void Driver::refuse_forked_child() {
  if (in_forked_child()) {
    throw UsageError(
        "ringdl was called in a forked process; only the process that called ringdl.init() may "
        "communicate (start DataLoader workers without ringdl calls)");
  }
}

Driver::Lock Driver::lock_for_call(const std::function<void()>& before_waiting) {
  refuse_forked_child();
  if (!threads_ && std::this_thread::get_id() != maker_) {
    throw UsageError(
        "ringdl was called from a second thread, but this MPI does not offer MPI_THREAD_MULTIPLE; "
        "call from the thread that called ringdl.init(), or start MPI with more thread support");
  }
  Lock lock(mutex_, std::defer_lock);
  if (!before_waiting || !lock.try_lock()) {
    if (before_waiting) before_waiting();
    lock.lock();
  }
  refuse_closed();
  return lock;
}

void Driver::refuse_shut_down() const {
  if (closed_.load(std::memory_order_relaxed)) {
    throw UsageError(
        "ringdl is shut down; call ringdl.init() first, and rebind() buckets that were made before "
        "shutdown()");
  }
}

void Driver::refuse_closed() const {
  refuse_shut_down();
  if (!broken_.empty()) throw Error(broken_);
}

void Driver::note_submitter() {
  if (shutting_down_ || engine_.parts().membership.is_leaving()) {
    throw UsageError("ringdl is shutting down; call ringdl.init() first");
  }
  engine_.parts().joining.refuse_joined();
  if (submits_for_caller) return;
  const std::thread::id caller = std::this_thread::get_id();
  if (!submitter_) submitter_ = caller;
  if (*submitter_ != caller) one_submitter_ = false;
}

bool Driver::submit_for_caller(bool does) { return std::exchange(submits_for_caller, does); }

void Driver::forget_submitters() {
  const Lock lock = lock_for_call();
  submitter_.reset();
  one_submitter_ = true;
}

// In shutdown() nobody may; else whoever waits is the only one that has submitted anything so far.
bool Driver::may_submit() const {
  const bool is_known = submits_for_caller || submitter_ == std::this_thread::get_id();
  return !(one_submitter_ && is_known) && !shutting_down_;
}

std::shared_ptr<Work> Driver::submit(const Call& call, void* data, bool is_named) {
  const Lock lock = lock_for_call();
  note_submitter();
  return is_named ? named(engine_.submit(call, data)) : engine_.submit(call, data);
}

// The lock is held since it was submitted.
std::shared_ptr<Work> Driver::named(std::shared_ptr<Work> work) {
  engine_.parts().works.name(*work);
  return work;
}

std::shared_ptr<Work> Driver::allreduce_now(const Call& call, void* data,
                                            const std::function<void()>& before_waiting) {
  Lock lock = lock_for_call(before_waiting);
  note_submitter();
  Immediate& immediate = engine_.parts().immediate;
  const Key key = immediate.next_key(call);
  const Plan plan = immediate.plan(call, key);
  if (plan.meeting == Meeting::kHeaders) {
    before_waiting();
    return named(engine_.submit(call, data));
  }
  const bool is_traced = engine_.parts().works.trace().is_on();
  const bool is_recorded = engine_.parts().works.recorder().is_on();
  const int64_t begin = is_traced ? now_ns() : is_recorded ? coarse_now_ns() : 0;
  if (plan.meeting == Meeting::kArraysInSlots) {
    SmallAllreduce small = immediate.begin_small(call, key, data);
    if (!poll_for_a_moment([&] { return small.step(size()); }, 0, before_waiting)) {
      before_waiting();
      return named(immediate.submit(call, key, data, small));
    }
  } else {
    before_waiting();
    auto direct = immediate.begin_direct(call, key, data);
    const size_t bytes = bytes_of(call);
    const bool is_polled = bytes <= kMostPolledBytes && engine_.parts().works.is_empty();
    if (!is_polled ||
        !poll_for_a_moment([&] { return direct->step_in_memory(); }, bytes, before_waiting)) {
      return named(immediate.submit(call, key, std::move(direct)));
    }
  }
  immediate.finish(call, key, plan.meeting, begin, is_traced ? now_ns() : begin);
  if (!engine_.parts().works.is_empty() || is_time_to_poll()) engine_.poll();
  return nullptr;
}

template <typename Step>
bool Driver::poll_for_a_moment(Step step, size_t bytes,
                               const std::function<void()>& before_waiting) {
  const int64_t meeting_ns = may_spin_ ? kMeetSpinNs : kMeetYieldNs;
  const auto reducing_ns = static_cast<int64_t>(bytes) * kNsPerPolledKiB / 1024;
  int64_t begin = 0;
  Polled polled = step();
  for (int poll = 1; polled == Polled::kAwaitsRanks || polled == Polled::kUnderWay; ++poll) {
    if (poll % kPollsPerTime == 0) {  // the clock takes longer than a poll
      if (poll == kPollsAtOnce) before_waiting();
      const int64_t now = now_ns();
      if (begin == 0) begin = now;
      if (now - begin > meeting_ns + (polled == Polled::kUnderWay ? reducing_ns : 0)) break;
    }
    if (!may_spin_) sched_yield();
    polled = step();
  }
  return polled == Polled::kDone;
}

bool Driver::is_time_to_poll() {
  if (threads_) return false;
  const int64_t now = now_ns();
  if (now < next_poll_ns_) return false;
  next_poll_ns_ = now + kStrayMessagesNs;
  return true;
}

void Driver::refuse(const Call& call, const std::string& why) {
  const Lock lock = lock_for_call();
  note_submitter();
  engine_.refuse(call, why);
}

void Driver::wake() {
  Lock lock = lock_for_call();
  awake_ = true;
  lock.unlock();
  wake_.notify_one();
}

void Driver::poll() {
  if (threads_ || in_forked_child() || closed_.load()) return;
  const Lock lock = lock_for_call();
  engine_.poll();
  engine_.find_failed_ranks(now_ns());
}

void Driver::open_box(const BoxName& name, std::shared_ptr<Box> box) {
  const Lock lock = lock_for_call();
  engine_.parts().mailbox.open(name, std::move(box));
}

std::shared_ptr<Work> Driver::call_box(const BoxName& name, int to,
                                       std::unique_ptr<Collective> caller) {
  const Lock lock = lock_for_call();
  if (engine_.parts().membership.is_leaving()) {
    throw UsageError("ringdl is shutting down; call ringdl.init() first");
  }
  return engine_.call_box(name, to, std::move(caller));
}

void Driver::help() {
  const Lock lock = lock_for_call();
  engine_.poll();
  engine_.find_failed_ranks(now_ns());
}

void Driver::refuse_failed(const Group& group) {
  const Lock lock = lock_for_call();
  if (const Failure failure = engine_.parts().membership.failure_in(group)) failure.raise();
}

bool Driver::is_gone(int rank) {
  const Lock lock = lock_for_call();
  return engine_.parts().membership.is_gone(rank);
}

size_t Driver::segment_bytes() {
  const Lock lock = lock_for_call();
  return engine_.parts().planning.segment_bytes();
}

void Driver::watch_over(int64_t now) {
  std::string text = engine_.watch_over(now);
  const int requests = dump_requests.load(std::memory_order_relaxed);
  if (std::exchange(dumps_done_, requests) != requests) {
    text += engine_.dump();
    if (flights_) flights_->flush();
  }
  engine_.parts().works.recorder().see(now);
  if (!text.empty()) std::fputs(text.c_str(), stderr);
}

void Driver::set_segment_bytes(size_t bytes) {
  const Lock lock = lock_for_call();
  engine_.parts().planning.set_segment_bytes(bytes);
}

void Driver::set_choice(const CostModel& model, std::optional<Algorithm> wanted,
                        size_t library_bytes) {
  const Lock lock = lock_for_call();
  engine_.parts().planning.choose_by(model, wanted, library_bytes);
}

void Driver::set_may_spin(bool may_spin) {
  const Lock lock = lock_for_call();
  may_spin_ = may_spin;
}

void Driver::set_watchdog(int64_t after_ns, bool dumps) {
  const Lock lock = lock_for_call();
  engine_.parts().watchdog.set_after(after_ns, dumps);
}

void Driver::set_window(std::shared_ptr<Window> window, std::vector<int> hosts) {
  const Lock lock = lock_for_call();
  engine_.parts().hosts.use(std::move(window), std::move(hosts));
}

SharedLayout Driver::layout_of(const Group& group) {
  const Lock lock = lock_for_call();
  return engine_.parts().hosts.layout_of(group);
}

std::shared_ptr<std::byte> Driver::allocate(size_t bytes) {
  refuse_forked_child();
  return engine_.parts().hosts.allocate(bytes);
}

void Driver::add_bucket(int64_t number, BucketSpec spec) {
  const Lock lock = lock_for_call();
  engine_.parts().buckets.add(number, std::move(spec));
}

DeviceExecutors& Driver::devices() const {
  DeviceExecutors* const found = engine_.parts().options.devices.get();
  if (found == nullptr) throw UsageError("these ranks reduce arrays in the CPU's memory only");
  return *found;
}

std::byte* Driver::reach_on(int device, const DevicePlace& place) {
  const Lock lock = lock_for_call();
  return devices().reached(device, place);
}

std::optional<DeviceLibrary::Member> Driver::library_member(int device, const BucketLayout& largest,
                                                            const Group& group) {
  const Lock lock = lock_for_call();
  const bool is_chosen = engine_.parts().planning.chooses_library(largest.dtype, Reduction::kSum,
                                                                  largest.bytes, group);
  if (!is_chosen) return {};
  return devices().library(group.id, group.rank, group.size(), device).member(device);
}

std::shared_ptr<Work> Driver::launch_bucket(int64_t number, const std::function<void()>& fill,
                                            bool is_awaited) {
  Lock lock = lock_for_call();
  engine_.parts().joining.refuse_joined();
  fill();
  note_submitter();
  std::shared_ptr<Work> work = engine_.launch_bucket(number);
  awake_ |= !is_awaited;
  lock.unlock();
  if (!is_awaited) wake_.notify_one();
  return work;
}

void Driver::fail_bucket(int64_t number, const std::string& why) {
  const Lock lock = lock_for_call();
  engine_.fail_bucket(number, why);
}

void Driver::remove_bucket(int64_t number) {
  refuse_forked_child();
  if (closed_.load()) return;
  const Lock lock = lock_for_call();
  engine_.remove_bucket(number);
}

void Driver::set_join_answers_allreduces_only(bool only) {
  const Lock lock = lock_for_call();
  engine_.parts().joining.answer_allreduces_only(only);
}

void Driver::know_group(const SharedGroup& group) {
  const Lock lock = lock_for_call();
  engine_.parts().joining.know(group);
}

void Driver::refuse_joined() {
  const Lock lock = lock_for_call();
  engine_.parts().joining.refuse_joined();
}

std::vector<uint64_t> Driver::take_ended() {
  if (in_forked_child()) return {};
  const Lock lock(mutex_);
  return engine_.parts().works.take_released();
}

void Driver::start_flight_recorder(const std::string& path, const std::string& host,
                                   const std::string& version) {
  const Lock lock = lock_for_call();
  flights_ = std::make_unique<MappedFile>(path, FlightRecorder::bytes());
  timespec today{};
  clock_gettime(CLOCK_REALTIME, &today);
  engine_.parts().works.recorder().start(
      flights_->data(),
      {rank(), size(), getpid(), today.tv_sec * kSecond + today.tv_nsec, host, version,
       thread_.joinable()},
      now_ns());
}

void Driver::note_end(const std::string& why) {
  if (in_forked_child()) return;
  const Lock lock(mutex_);
  engine_.parts().works.recorder().note_end(why);
}

void Driver::start_trace() {
  const Lock lock = lock_for_call();
  engine_.parts().works.trace().start();
}

std::vector<Trace::Event> Driver::take_trace() {
  refuse_forked_child();
  const Lock lock(mutex_);
  return engine_.parts().works.take_trace();
}

std::vector<Trace::Event> Driver::stop_trace() {
  const Lock lock = lock_for_call();
  return engine_.parts().works.trace().stop();
}

std::map<std::string, double> Driver::stats() const {
  refuse_forked_child();
  const Lock lock(mutex_);
  std::map<std::string, double> stats = engine_.stats();
  stats["wait_seconds"] = static_cast<double>(wait_ns_) / kSecond;
  return stats;
}

}  // namespace ringdl

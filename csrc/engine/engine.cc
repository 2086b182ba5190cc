#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/buffer.h"
#include "base/clock.h"
#include "base/error.h"
#include "collective/host_allreduce.h"
#include "collective/slot_allreduce.h"
#include "engine/make_collective.h"

namespace ringdl {
namespace {

// With more works in flight than this, further ones send no payload before they are granted: what
// peers hold for works that they have not submitted is bounded by 1024 x inline_bytes.
constexpr int64_t kMaxInlineWorks = 1024;

std::atomic<bool> forked = false;

// So long does a caller who waits look for what the others put into their slots before its work
// becomes one like any other: what a message takes, or, on shared cores, a few turns of the others.
constexpr int64_t kMeetSpinNs = 20 * kMicrosecond;
constexpr int64_t kMeetYieldNs = 200 * kMicrosecond;
constexpr int kLooksPerTime = 8;
constexpr int kLooksAtOnce = 64;  // about a microsecond

// So often does who calls look for messages that nothing here waits for, where no thread does. Not
// at each call: an MPI that yields its core when it finds none would double the time of a small
// one.
constexpr int64_t kStrayMessagesNs = 200 * kMicrosecond;

}  // namespace

std::shared_ptr<Engine> make_engine(std::unique_ptr<Transport> transport, EngineOptions options) {
  return {new Engine(std::move(transport), options), [](Engine* engine) {
            if (!forked.load()) delete engine;
          }};
}

Engine::Engine(std::unique_ptr<Transport> transport, EngineOptions options)
    : transport_(std::move(transport)),
      options_(options),
      rank_(transport_->rank()),
      size_(transport_->size()),
      all_(ringdl::group_of_all(rank_, size_)),
      maker_(std::this_thread::get_id()),
      tag_layout_(transport_->max_tag()),
      tags_(static_cast<size_t>(size_), TagPool(tag_layout_.pooled)) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  if (registered != 0) throw Error("pthread_atfork failed");
  options_.inline_bytes = std::min(options_.inline_bytes, kMaxPayloadBytes);
  control_ = std::make_unique<ControlPlane>(
      *transport_, [this](const ControlMessage& message) { handle(message); });
  departures_ = std::make_unique<Departures>(*control_, rank_, size_);
  Diagnosis::Host& host = *this;
  diagnosis_ = std::make_unique<Diagnosis>(host, *transport_, *control_);
  watchdog_ = std::make_unique<Watchdog>(*diagnosis_, rank_);
  if (!options_.threads || size_ == 1) return;
  try {
    thread_ = std::thread([this] { progress_in_background(); });
  } catch (const std::system_error& error) {
    control_->close();
    throw Error("this process may start no thread more (" + std::string(error.what()) +
                "): raise its limits of memory or of processes (ulimit -v, ulimit -u)");
  } catch (...) {
    control_->close();
    throw;
  }
}

Engine::~Engine() {
  stop_thread();
  if (!closed_.load()) give_up();
}

void Engine::give_up() noexcept try {
  for (auto& [number, bucket] : buckets_) {
    if (bucket.prepared) bucket.prepared->bucket_channel->abort();
  }
  while (!in_flight_.empty()) {
    const std::shared_ptr<Work> work = in_flight_.begin()->second;
    fail(work, {"the communicator was destroyed while " + work->label() + " was in flight"});
  }
  any_receives_.clear();
  for (const auto& drain : drains_) {
    if (drain->receive) transport_->withdraw(*drain->receive);
  }
  control_->close();
  for (const auto& work : leaving_) keep_for_good(work);
  if (!control_->idle()) keep_for_good(std::shared_ptr<ControlPlane>(std::move(control_)));
} catch (...) {  // the transport is broken: there is nothing left to withdraw from
}

void Engine::abandon() {
  if (closed_.load() || in_forked_child()) return;
  stop_thread();
  const Lock lock(mutex_);
  give_up();
  closed_.store(true);
  groups_.clear();
  transport_.reset();
}

void Engine::stop_thread() {
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Engine::in_forked_child() { return forked.load(std::memory_order_relaxed); }

void Engine::refuse_forked_child() {
  if (in_forked_child()) {
    throw UsageError(
        "ringdl was called in a forked process; only the process that called ringdl.init() may "
        "communicate (start DataLoader workers without ringdl calls)");
  }
}

Engine::Lock Engine::lock_for_call(const std::function<void()>& before_waiting) {
  refuse_forked_child();
  if (!options_.threads && std::this_thread::get_id() != maker_) {
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

void Engine::refuse_closed() const {
  if (closed_.load(std::memory_order_relaxed)) {
    throw UsageError("ringdl is shut down; call ringdl.init() first");
  }
  if (!broken_.empty()) throw Error(broken_);
}

void Engine::note_submitter() {
  if (shutting_down_ || departures_->has_left(rank_)) {
    throw UsageError("ringdl is shutting down; call ringdl.init() first");
  }
  refuse_joined_unlocked();
  const std::thread::id caller = std::this_thread::get_id();
  if (!submitter_) submitter_ = caller;
  if (*submitter_ != caller) one_submitter_ = false;
}

void Engine::refuse_joined_unlocked() const {
  if (joining_) {
    throw UsageError(
        "this rank has called join() and only answers calls of others until all ranks "
        "have; wait for join() to return");
  }
}

void Engine::forget_submitters() {
  Lock lock = lock_for_call();
  submitter_.reset();
  one_submitter_ = true;
}

// In shutdown() nobody may; else whoever waits is the only one that has submitted anything so far.
bool Engine::may_submit() const {
  const bool is_only_one = one_submitter_ && submitter_ == std::this_thread::get_id();
  return !is_only_one && !shutting_down_;
}

ChannelContext Engine::context(const SharedGroup& group) {
  return {*transport_, *control_, tags_, counters_, group};
}

std::shared_ptr<Work> Engine::submit(const Call& call, void* data) {
  Lock lock = lock_for_call();
  // As many headers may be parked at a peer, and as many tags can be granted.
  if (in_flight_.size() >= static_cast<size_t>(tag_layout_.pooled)) {
    throw UsageError(std::to_string(tag_layout_.pooled) +
                     " works are in flight on this rank; wait for some before submitting more");
  }
  note_submitter();
  if (call.from_any) return receive_from_any(call, data);
  const Description description = header_of(call, *find_layout(call.group ? *call.group : *all_));
  std::shared_ptr<Buffer> stand_in;  // see row_bytes()
  if (has_uneven_rows(call.kind) && bytes_of(call) > 0 && description.count == 0) {
    stand_in = std::make_shared<Buffer>(bytes_of(call));
    std::fill_n(stand_in->data(), stand_in->size(), std::byte{0});
    data = stand_in->data();
  }
  if (description.algorithm == Algorithm::kMpi && !in_flight_.empty()) {
    throw UsageError(std::to_string(in_flight_.size()) +
                     " works are in flight on this rank; MPI's own allreduce needs that there are "
                     "none: wait for them first, or take another algorithm");
  }
  const Key key = key_of(call, call.group ? *call.group : *all_);
  return submit_as(key, call, description, data, std::move(stand_in));
}

std::shared_ptr<Work> Engine::submit_as(const Key& key, const Call& call,
                                        const Description& description, void* data,
                                        std::shared_ptr<const void> memory) {
  const SharedGroup& group = call.group ? call.group : all_;
  const SharedLayout layout = find_layout(*group);
  const bool is_shared = layout->hosts.size() < group->ranks.size();
  auto collective = make_collective(call, description, data, *group, options_.segment_bytes,
                                    is_shared ? window_ : nullptr, layout);
  const bool is_in_slots =
      slots_ && call.kind == Kind::kAllreduce && key.space == KeySpace::kUnnamed && group->is_all();
  if (is_in_slots) slots_->pass(key.instance);
  auto work = make_work(description, key, group);
  work->collective = std::move(collective);
  work->memory = std::move(memory);
  start(work);
  return work;
}

std::shared_ptr<Work> Engine::allreduce_now(const Call& call, void* data,
                                            const std::function<void()>& before_waiting) {
  Lock lock = lock_for_call(before_waiting);
  const std::shared_ptr<Work> before = in_slots_.expired() ? nullptr : in_slots_.lock();
  const Key key = key_of(call, *all_);
  const size_t bytes = bytes_of(call);
  const bool is_small = bytes <= Slots::most_bytes(size_);
  const bool is_here = has_slots() && has_reduction(call.dtype, call.reduction) &&
                       (is_small || choose(bytes, *find_layout(*all_)) == Algorithm::kDirect);
  if (!is_here || (before && !before->ended()) || matching_.is_known_to_fail(key)) {
    lock.unlock();
    before_waiting();
    return submit(call, data);
  }
  note_submitter();
  const int64_t begin = trace_.is_on() ? now_ns() : 0;
  SlotCall slot_call{slots_, key.instance, digest_of(call)};
  auto* const array = static_cast<std::byte*>(data);
  const Join join(call.dtype, call.reduction, size_);
  std::unique_ptr<Collective> collective;
  if (is_small) {
    SmallAllreduce small(std::move(slot_call), array, bytes, join, rank_);
    SlotExchange::State state = small.step(size_);
    int64_t until = 0;
    for (int look = 1; state == SlotExchange::State::kNotYet; ++look) {
      if (look % kLooksPerTime == 0) {  // the clock takes longer than a look
        if (look == kLooksAtOnce) before_waiting();
        const int64_t now = now_ns();
        if (until == 0) until = now + (options_.may_spin ? kMeetSpinNs : kMeetYieldNs);
        if (now > until) break;
      }
      if (!options_.may_spin) sched_yield();
      state = small.step(size_);
    }
    if (state == SlotExchange::State::kAllHavePut) {
      if (!in_flight_.empty() || is_time_to_poll()) progress();
      matching_.advance(key);
      matching_.take(key);  // a rank that has waited for longer has sent its header
      ++works_ended_;
      ++common_works_ended_;
      if (begin != 0) {
        const std::string name = label_of(key, header_of(call, *find_layout(*all_)), *all_);
        trace_.add({next_id_++, name, "slots", static_cast<int64_t>(bytes), begin, now_ns()});
      }
      return nullptr;
    }
    collective = std::make_unique<SlotAllreduce>(small, [this, call, data] {
      const SharedLayout layout = find_layout(*all_);
      return make_collective(call, header_of(call, *layout), data, *all_, options_.segment_bytes,
                             window_, layout);
    });
  } else {
    before_waiting();
    collective =
        std::make_unique<HostAllreduce>(window_, all_->ranks, find_layout(*all_), array, bytes,
                                        join, Reducer(call.dtype, call.reduction, size_),
                                        options_.segment_bytes, Codec(), std::move(slot_call));
  }
  before_waiting();
  auto work = make_work(header_of(call, *find_layout(*all_)), key, all_);
  work->collective = std::move(collective);
  in_slots_ = work;
  start(work);
  return work;
}

bool Engine::is_time_to_poll() {
  if (options_.threads) return false;
  const int64_t now = now_ns();
  if (now < next_poll_ns_) return false;
  next_poll_ns_ = now + kStrayMessagesNs;
  return true;
}

Algorithm Engine::choose(size_t bytes, const HostLayout& layout) const {
  if (wanted_ && is_possible(*wanted_, bytes, layout, options_.segment_bytes)) return *wanted_;
  return choose_allreduce(costs_, bytes, layout, options_.segment_bytes);
}

Description Engine::header_of(const Call& call, const HostLayout& layout) const {
  Description description = describe(call);
  if (call.kind == Kind::kAllreduce) {
    description.algorithm = call.algorithm ? *call.algorithm : choose(bytes_of(call), layout);
  }
  description.inline_bytes = inline_bytes();
  description.joins = next_meeting();
  return description;
}

uint32_t Engine::inline_bytes() const {
  return inline_works_ < kMaxInlineWorks ? static_cast<uint32_t>(options_.inline_bytes) : 0;
}

Key Engine::key_of(const Call& call, const Group& group) {
  const uint64_t what = call.name.empty() ? static_cast<uint64_t>(call.kind) : hash_of(call.name);
  return matching_.next(call.name.empty() ? KeySpace::kUnnamed : KeySpace::kName, what ^ group.id);
}

std::shared_ptr<Work> Engine::make_work(const Description& description, const Key& key,
                                        const SharedGroup& group) {
  auto work = std::make_shared<Work>(next_id_++, key, description, group);
  work->keyed_channel = std::make_unique<KeyedChannel>(context(group), key, description,
                                                       [this, raw = work.get()] { touch(*raw); });
  return work;
}

void Engine::wake() {
  Lock lock = lock_for_call();
  awake_ = true;
  lock.unlock();
  wake_.notify_one();
}

void Engine::set_segment_bytes(size_t bytes) {
  Lock lock = lock_for_call();
  if (bytes == 0 || bytes > Transport::kMaxMessageBytes) {
    throw UsageError("segment_bytes must be between 1 and 2^30, not " + std::to_string(bytes));
  }
  options_.segment_bytes = bytes;
}

void Engine::set_choice(const CostModel& model, std::optional<Algorithm> wanted) {
  Lock lock = lock_for_call();
  costs_ = model;
  wanted_ = wanted;
}

void Engine::set_window(std::shared_ptr<Window> window, std::vector<int> hosts) {
  Lock lock = lock_for_call();
  window_ = std::move(window);
  hosts_ = std::move(hosts);
  layouts_.clear();
  if (!window_ || !shares_memory(*all_)) return;
  slots_memory_ = window_->allocate(Slots::bytes());  // at the same place on all ranks
  const uint64_t offset = *window_->offset_of(slots_memory_.get(), Slots::bytes());
  std::vector<std::byte*> memory;
  for (int rank = 0; rank < size_; ++rank) memory.push_back(window_->at(rank, offset));
  slots_ = std::make_shared<Slots>(std::move(memory), rank_);
}

SharedLayout Engine::layout_of(const Group& group) {
  Lock lock = lock_for_call();
  return find_layout(group);
}

SharedLayout Engine::find_layout(const Group& group) {
  SharedLayout& layout = layouts_[group.id];
  if (!layout) {
    std::vector<int> hosts;
    for (const int rank : group.ranks) {
      hosts.push_back(hosts_.empty() ? rank : hosts_[static_cast<size_t>(rank)]);
    }
    layout = std::make_shared<const HostLayout>(HostLayout::of(hosts, group.rank));
  }
  return layout;
}

std::shared_ptr<std::byte> Engine::allocate(size_t bytes) {
  refuse_forked_child();
  std::shared_ptr<std::byte> memory = window_ ? window_->allocate(bytes) : nullptr;
  return memory ? memory : ringdl::allocate(bytes);
}

bool Engine::shares_memory(const Group& group) const {
  return window_ != nullptr && group.size() > 1 &&
         std::all_of(group.ranks.begin(), group.ranks.end(),
                     [this](int rank) { return window_->reaches(rank); });
}

void Engine::set_watchdog(int64_t after_ns, bool dumps) {
  Lock lock = lock_for_call();
  watchdog_->set_after(after_ns);
  watchdog_dumps_ = dumps;
}

void Engine::set_may_spin(bool may_spin) {
  Lock lock = lock_for_call();
  options_.may_spin = may_spin;
}

void Engine::refuse_joined() {
  Lock lock = lock_for_call();
  refuse_joined_unlocked();
}

void Engine::look() {
  if (options_.threads || in_forked_child() || closed_.load()) return;
  Lock lock = lock_for_call();
  progress();
}

std::vector<uint64_t> Engine::take_ended() {
  if (in_forked_child()) return {};
  Lock lock(mutex_);
  return std::exchange(ended_, {});
}

void Engine::start_trace() {
  Lock lock = lock_for_call();
  trace_.start();
}

std::vector<Trace::Event> Engine::take_trace() {
  refuse_forked_child();
  Lock lock(mutex_);
  std::vector<Trace::Event> in_flight;
  if (!trace_.is_on()) return in_flight;
  for (const auto& [key, work] : in_flight_) {
    if (trace_.is_new(work->begin_ns)) in_flight.push_back(event_of(*work, 0));
  }
  std::vector<Trace::Event> events = trace_.take(now_ns());
  events.insert(events.end(), in_flight.begin(), in_flight.end());
  return events;
}

std::vector<Trace::Event> Engine::stop_trace() {
  Lock lock = lock_for_call();
  return trace_.stop();
}

std::map<std::string, double> Engine::stats() const {
  refuse_forked_child();
  Lock lock(mutex_);
  const auto number = [](auto value) { return static_cast<double>(value); };
  return {
      {"works", number(works_ended_)},
      {"works_in_flight", number(in_flight_.size())},
      {"messages_sent", number(control_->messages_sent() + counters_.data_messages_sent)},
      {"bytes_sent", number(control_->bytes_sent() + counters_.data_bytes_sent)},
      {"control_messages_sent", number(control_->messages_sent())},
      {"control_messages_received", number(control_->messages_received())},
      {"data_messages_sent", number(counters_.data_messages_sent)},
      {"data_bytes_sent", number(counters_.data_bytes_sent)},
      {"grants_sent", number(counters_.grants_sent)},
      {"polls", number(polls_)},
      {"wait_seconds", number(wait_ns_) / kSecond},
      {"keys", number(matching_.keys())},
      {"parked_keys", number(matching_.parked_keys())},
  };
}

}  // namespace ringdl

#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace ringdl {
namespace {

// With more works in flight than this, further ones send no payload before they are granted: what
// peers hold for works that they have not submitted is bounded by 1024 x inline_bytes.
constexpr int64_t kMaxInlineWorks = 1024;

std::atomic<bool> forked = false;

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
      tags_(static_cast<size_t>(size_), TagPool(tag_layout_.pooled)),
      left_(static_cast<size_t>(size_), false) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  if (registered != 0) throw Error("pthread_atfork failed");
  options_.inline_bytes = std::min(options_.inline_bytes, kMaxPayloadBytes);
  control_ = std::make_unique<ControlPlane>(
      *transport_, [this](const ControlMessage& message) { handle(message); });
  Diagnosis::Host& host = *this;
  diagnosis_ = std::make_unique<Diagnosis>(host, *transport_, *control_);
  watchdog_ = std::make_unique<Watchdog>(*diagnosis_, rank_);
  if (!options_.threads || size_ == 1) return;
  try {
    thread_ = std::thread([this] { progress_in_background(); });
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
    fail(work, "the communicator was destroyed while " + work->label() + " was in flight");
  }
  for (const auto& drain : drains_) {
    if (drain->receive) transport_->withdraw(*drain->receive);
  }
  control_->close();
  for (const auto& work : leaving_) keep_for_good(work);
  if (!control_->idle()) keep_for_good(std::shared_ptr<ControlPlane>(std::move(control_)));
} catch (...) {  // the transport is broken: there is nothing left to withdraw from
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

Engine::Lock Engine::lock_for_call() {
  refuse_forked_child();
  if (!options_.threads && std::this_thread::get_id() != maker_) {
    throw UsageError(
        "ringdl was called from a second thread, but this MPI does not offer MPI_THREAD_MULTIPLE; "
        "call from the thread that called ringdl.init(), or start MPI with more thread support");
  }
  Lock lock(mutex_);
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
  if (shutting_down_ || left_[static_cast<size_t>(rank_)]) {
    throw UsageError("ringdl is shutting down; call ringdl.init() first");
  }
  const std::thread::id caller = std::this_thread::get_id();
  if (!submitter_) submitter_ = caller;
  if (*submitter_ != caller) one_submitter_ = false;
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
  const SharedGroup& group = call.group ? call.group : all_;
  Description description = describe(call);
  description.inline_bytes =
      inline_works_ < kMaxInlineWorks ? static_cast<uint32_t>(options_.inline_bytes) : 0;
  std::shared_ptr<Buffer> stand_in;  // see row_bytes()
  if (has_uneven_rows(call.kind) && bytes_of(call) > 0 && description.count == 0) {
    stand_in = std::make_shared<Buffer>(bytes_of(call));
    std::fill_n(stand_in->data(), stand_in->size(), std::byte{0});
    data = stand_in->data();
  }
  auto collective = make_collective(call, description, data, *group, options_.segment_bytes);
  if (description.algorithm == Algorithm::kMpi && !in_flight_.empty()) {
    throw UsageError(std::to_string(in_flight_.size()) +
                     " works are in flight on this rank; MPI's own allreduce needs that there are "
                     "none: wait for them first, or take another algorithm");
  }
  note_submitter();
  const uint64_t what = call.name.empty() ? static_cast<uint64_t>(call.kind) : hash_of(call.name);
  const Key key =
      matching_.next(call.name.empty() ? KeySpace::kUnnamed : KeySpace::kName, what ^ group->id);
  auto work = std::make_shared<Work>(next_id_++, key, description, group);
  work->keyed_channel = std::make_unique<KeyedChannel>(context(group), key, description,
                                                       [this, raw = work.get()] { touch(*raw); });
  work->collective = std::move(collective);
  work->memory = std::move(stand_in);
  start(work);
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

void Engine::set_watchdog(int64_t after_ns, bool dumps) {
  Lock lock = lock_for_call();
  watchdog_->set_after(after_ns);
  watchdog_dumps_ = dumps;
}

void Engine::set_may_spin(bool may_spin) {
  Lock lock = lock_for_call();
  options_.may_spin = may_spin;
}

std::vector<uint64_t> Engine::take_ended() {
  if (in_forked_child()) return {};
  Lock lock(mutex_);
  return std::exchange(ended_, {});
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

#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "collective/barrier.h"
#include "collective/broadcast.h"
#include "collective/ring_allreduce.h"

namespace ringdl {
namespace {

// With more works in flight than this, further ones send no payload before they are granted: what
// peers hold for works that they have not submitted is bounded by 1024 x inline_bytes.
constexpr int64_t kMaxInlineWorks = 1024;

std::atomic<bool> forked = false;

Description describe(const Call& call) {
  Description description;
  description.kind = call.kind;
  description.dtype = call.dtype;
  description.reduction = call.reduction;
  description.root = call.root;
  description.dimensions = static_cast<int32_t>(call.shape.size());
  description.count = 1;
  // The first dimension of an allgather may differ between ranks.
  const size_t first = call.kind == Kind::kAllgather ? 1 : 0;
  std::string dimensions;
  for (size_t i = first; i < call.shape.size(); ++i) {
    description.count *= call.shape[i];
    dimensions += std::to_string(call.shape[i]) + ",";
    if (i - first < kMaxDimensions) description.shape[i - first] = call.shape[i];
  }
  if (first == 1) --description.dimensions;
  description.shape_hash = hash_of(dimensions);
  set_name(description, call.name);
  return description;
}

size_t bytes_of(const Call& call) {
  size_t bytes = item_bytes(call.dtype);
  for (const int64_t extent : call.shape) bytes *= static_cast<size_t>(extent);
  return bytes;
}

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
      maker_(std::this_thread::get_id()),
      tag_layout_(transport_->max_tag()),
      tags_(static_cast<size_t>(size_), TagPool(tag_layout_.pooled)),
      left_(static_cast<size_t>(size_), false) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  if (registered != 0) throw Error("pthread_atfork failed");
  options_.inline_bytes = std::min(options_.inline_bytes, kMaxPayloadBytes);
  control_ = std::make_unique<ControlPlane>(
      *transport_, [this](const ControlMessage& message) { handle(message); });
  diagnosis_ = std::make_unique<Diagnosis>(*this);
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
    fail(work, "the communicator was destroyed while " + work->label + " was in flight");
  }
  for (const auto& drain : drains_) {
    if (drain->receive) transport_->withdraw(*drain->receive);
  }
  control_->close();
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
  if (shutting_down_) throw UsageError("ringdl is shutting down; call ringdl.init() first");
  const std::thread::id caller = std::this_thread::get_id();
  if (!submitter_) submitter_ = caller;
  if (*submitter_ != caller) one_submitter_ = false;
}

ChannelContext Engine::context() { return {*transport_, *control_, tags_, counters_}; }

std::shared_ptr<Work> Engine::submit(const Call& call, void* data) {
  Lock lock = lock_for_call();
  if (call.kind == Kind::kBroadcast && (call.root < 0 || call.root >= size_)) {
    throw UsageError("broadcast: root " + std::to_string(call.root) +
                     " is not a rank; ranks are 0 to " + std::to_string(size_ - 1));
  }
  // As many headers may be parked at a peer, and as many tags can be granted.
  if (in_flight_.size() >= static_cast<size_t>(tag_layout_.pooled)) {
    throw UsageError(std::to_string(tag_layout_.pooled) +
                     " works are in flight on this rank; wait for some before submitting more");
  }
  note_submitter();
  Description description = describe(call);
  description.inline_bytes =
      inline_works_ < kMaxInlineWorks ? static_cast<uint32_t>(options_.inline_bytes) : 0;
  Key key{KeySpace::kName, hash_of(call.name), 0};
  if (call.name.empty()) key = {KeySpace::kUnnamed, static_cast<uint64_t>(call.kind), 0};
  key.instance = next_instance(key);

  auto work = std::make_shared<Work>(next_id_++, key, description);
  work->keyed_channel = std::make_unique<KeyedChannel>(context(), key, description,
                                                       [this, raw = work.get()] { touch(*raw); });
  auto* bytes = static_cast<std::byte*>(data);
  switch (call.kind) {
    case Kind::kAllreduce:
      work->collective = std::make_unique<RingAllreduce>(bytes, bytes_of(call),
                                                         Reducer(call.dtype, call.reduction, size_),
                                                         rank_, size_, options_.segment_bytes);
      break;
    case Kind::kBroadcast:
      work->collective = std::make_unique<Broadcast>(bytes, bytes_of(call), call.root, rank_, size_,
                                                     options_.segment_bytes);
      break;
    case Kind::kAllgather: {
      auto allgather =
          std::make_unique<Allgather>(bytes, bytes_of(call), rank_, size_, options_.segment_bytes);
      work->allgather = allgather.get();
      work->collective = std::move(allgather);
      break;
    }
    case Kind::kBarrier:
      work->collective = std::make_unique<Barrier>();
      break;
  }
  start(work);
  return work;
}

// The first step hands the first messages to the channel, so that the header can carry one of them.
void Engine::start(const std::shared_ptr<Work>& work) {
  in_flight_[work->key] = work;
  ++next_instance(work->key);
  ++inline_works_;
  Parked parked;
  if (const auto found = parked_.find(work->key); found != parked_.end()) {
    parked = std::move(found->second);
    parked_.erase(found);
  }
  if (!parked.failure.empty()) {
    fail(work, parked.failure);
    return;
  }
  if (work->collective->step(work->channel())) {
    finish(work);
    return;
  }
  work->keyed_channel->announce();
  for (const Parked::Message& message : parked.messages) {
    if (work->ended()) break;
    apply(*work, message.from, message.head, message.description, message.payload.data());
  }
  if (!work->ended()) check_previous_left(work);
  progress();
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
      {"keys", number(next_instances_.size())},
      {"parked_keys", number(parked_.size())},
  };
}

}  // namespace ringdl

#include "engine/work_table.h"

#include <algorithm>
#include <utility>

#include "base/keep_for_good.h"
#include "collective/collective.h"

namespace ringdl {

WorkTable::WorkTable(Transport& transport, ControlPlane& control, Executor& executor,
                     const Clock& clock, OnEnd on_end)
    : transport_(transport),
      control_(control),
      executor_(executor),
      clock_(clock),
      on_end_(std::move(on_end)),
      tags_(TagLayout(transport.max_tag()).pooled) {}

ChannelContext WorkTable::context(const SharedGroup& group) {
  return {transport_, control_, tags_, counters_, group};
}

std::shared_ptr<Work> WorkTable::make_keyed(const Description& description, const Key& key,
                                            const SharedGroup& group) {
  auto work = std::make_shared<Work>(next_id_++, key, description, group);
  work->keyed_channel = std::make_unique<KeyedChannel>(context(group), key, description,
                                                       [this, raw = work.get()] { touch(*raw); });
  return work;
}

std::shared_ptr<Work> WorkTable::make_prepared(const Description& description, const Key& key,
                                               const SharedGroup& group, int tag) {
  auto work = std::make_shared<Work>(next_id_++, key, description, group);
  work->state = Work::State::kPrepared;
  work->bucket_channel = std::make_unique<BucketChannel>(context(group), tag,
                                                         [this, raw = work.get()] { touch(*raw); });
  return work;
}

void WorkTable::begin(const std::shared_ptr<Work>& work) {
  work->begin_ns = clock_.now_ns();
  work->flight = recorder_.begin(work->key, work->description, *work->group, work->begin_ns,
                                 work->names_no_sender);
  in_flight_[work->key] = work;
  if (work->keyed_channel) ++keyed_works_;
  work->state = Work::State::kRunning;
}

bool WorkTable::step(const std::shared_ptr<Work>& work) {
  work->touched = false;
  if (work->is_broken) return false;
  const int64_t before = work->collective->pieces();
  try {
    if (work->collective->step(work->channel())) {
      ++moves_;
      finish(work);
      return true;
    }
  } catch (const std::exception& error) {
    FailureKind kind = FailureKind::kDevice;
    if (work->description.memory != MemoryKind::kDevice) {
      if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr) throw;
      kind = FailureKind::kMemory;
    } else if (dynamic_cast<const UsageError*>(&error) != nullptr) {
      kind = FailureKind::kUsage;
    }
    work->is_broken = true;
    broken_.push_back({work, error.what(), kind});
    return false;
  }
  const int64_t after = work->collective->pieces();
  if (after > before) ++moves_;
  if (!work->polled && (after >= 0 || !executor_.is_immediate())) {
    ++moves_;
    work->polled = true;
    polled_.push_back(work);
  }
  return false;
}

int WorkTable::step_polled() {
  const uint64_t before = moves_;
  bool has_ended = false;
  for (size_t i = 0; i < polled_.size(); ++i) {
    const std::shared_ptr<Work> work = polled_[i];
    if (work->ended()) ++moves_;  // elsewhere
    if (work->ended() || step(work)) has_ended = true;
  }
  if (has_ended) std::erase_if(polled_, [](const auto& work) { return work->ended(); });
  return static_cast<int>(moves_ - before);
}

int WorkTable::settle() {
  const int moved = step_polled();
  while (!touched_.empty()) {
    const std::shared_ptr<Work> work = std::move(touched_.front());
    touched_.pop_front();
    if (!std::exchange(work->touched, false)) continue;  // it was polled
    if (work->state.load(std::memory_order_relaxed) != Work::State::kRunning) continue;
    step(work);
  }
  std::erase_if(leaving_, [this](const auto& work) {
    if (!is_idle(*work)) return false;
    release(*work);  // only now may its buffer be freed
    return true;
  });
  const size_t drained = std::erase_if(drains_, [this](const auto& drain) {
    if (!drain->done()) return false;
    tags_.of(drain->open.from).give_back(drain->open.tag);
    return true;
  });
  if (drained == 0) return moved;
  for (const auto& [key, work] : in_flight_) {  // some may have found no tag
    if (work->keyed_channel) work->keyed_channel->route_waiting();
  }
  return moved;
}

void WorkTable::touch(Work& work) {
  if (work.touched) return;
  const auto found = in_flight_.find(work.key);
  if (found == in_flight_.end() || found->second.get() != &work) return;
  work.touched = true;
  touched_.push_back(found->second);
}

// What finish() and fail() have in common.
void WorkTable::end(const std::shared_ptr<Work>& work, const Failure& why) {
  if (work->keyed_channel) --keyed_works_;
  in_flight_.erase(work->key);
  if (work->group->is_all()) ++common_ended_;
  if (!trace_.is_on() && !recorder_.is_on()) return;
  const int64_t now = clock_.now_ns();
  recorder_.end(work->flight, now, why.text);
  if (trace_.is_on()) trace_.add(event_of(*work, now));
}

void WorkTable::finish(const std::shared_ptr<Work>& work) {
  if (work->keyed_channel) work->keyed_channel->finish();
  end(work, {});
  ++ended_;
  release(*work);
  work->state.store(Work::State::kDone, std::memory_order_release);
  on_end_(*work, {});
}

void WorkTable::fail(const std::shared_ptr<Work>& work, const Failure& why) {
  if (work->keyed_channel) {
    for (const KeyedChannel::OpenTag& open : work->keyed_channel->abort()) {
      drains_.push_back(std::make_unique<Drain>(*this, open, work->key));
      drains_.back()->receive_next();
    }
  } else {
    work->bucket_channel->abort();
  }
  end(work, why);
  work->failure = why;
  work->collective->stop();
  if (work->memory && work->collective->pieces() >= 0) {  // others may be writing there
    kept_memory_.push_back(work->memory);
  }
  work->last_operation = executor_.last();
  const bool may_be_written = why.kind == FailureKind::kRankFailed ||
                              why.kind == FailureKind::kDevice || why.kind == FailureKind::kMemory;
  if (may_be_written && work->collective->pieces() >= 0) {
    kept_works_.push_back(work);  // other ranks may write to its buffer: it is not released
    work->is_kept.store(true, std::memory_order_release);
  } else if (is_idle(*work)) {
    release(*work);
  } else {
    leaving_.push_back(work);
  }
  on_end_(*work, why);
  work->state.store(Work::State::kFailed, std::memory_order_release);
}

// Frees what a work that has ended holds, however long its user keeps it, but what it has gathered.
void WorkTable::name(Work& work) {
  work.is_named = true;
  if (work.released.load(std::memory_order_relaxed)) released_.push_back(work.id);
}

void WorkTable::release(Work& work) {
  if (work.failure || work.collective->gathered() == nullptr) work.collective.reset();
  work.memory.reset();
  if (work.is_named) released_.push_back(work.id);
  work.released.store(true, std::memory_order_release);
}

std::shared_ptr<Work> WorkTable::find(const Key& key) const {
  const auto found = in_flight_.find(key);
  return found == in_flight_.end() ? nullptr : found->second;
}

bool WorkTable::is_drained() const {
  return drains_.empty() && std::none_of(leaving_.begin(), leaving_.end(), [](const auto& work) {
           return work->keyed_channel != nullptr;
         });
}

void WorkTable::on_closed(int from, const Key& key, int64_t sent, size_t longest_bytes) {
  for (const auto& drain : drains_) {
    if (drain->key != key || drain->open.from != from) continue;
    drain->open.sent = sent;
    drain->open.longest_bytes = longest_bytes;
    drain->receive_next();
  }
}

void WorkTable::forget_drains(int rank) {
  std::erase_if(drains_, [this, rank](const auto& drain) {
    if (drain->open.from != rank) return false;
    if (drain->receive) transport_.withdraw(*drain->receive);
    return true;
  });
}

void WorkTable::count_unseen() {
  ++ended_;
  ++common_ended_;
}

std::vector<Trace::Event> WorkTable::take_trace() {
  std::vector<Trace::Event> in_flight;
  if (!trace_.is_on()) return in_flight;
  for (const auto& [key, work] : in_flight_) {
    if (trace_.is_new(work->begin_ns)) in_flight.push_back(event_of(*work, 0));
  }
  std::vector<Trace::Event> events = trace_.take(clock_.now_ns());
  events.insert(events.end(), in_flight.begin(), in_flight.end());
  return events;
}

void WorkTable::withdraw() {
  for (const auto& drain : drains_) {
    if (drain->receive) transport_.withdraw(*drain->receive);
  }
}

void WorkTable::let_go() {
  for (auto& work : std::exchange(leaving_, {})) kept_works_.push_back(std::move(work));
  for (const auto& work : std::exchange(kept_works_, {})) {
    if (transport_.reads_on()) {
      keep_for_good(work);
    } else {
      release(*work);  // whoever still has it may outlive what it refers to
    }
  }
  for (auto& memory : std::exchange(kept_memory_, {})) {
    if (transport_.reads_on()) keep_for_good(std::move(memory));
  }
}

Trace::Event WorkTable::event_of(const Work& work, int64_t end_ns) {
  const std::string standing = work.collective->describe();
  const int64_t elements = has_uneven_rows(work.description.kind) ? 0 : work.description.count;
  const auto item = static_cast<int64_t>(item_bytes(work.description.dtype));
  const std::string algorithm = standing.substr(0, standing.find(':'));
  return {work.id, work.label(), algorithm, elements * item, work.begin_ns, end_ns};
}

void WorkTable::Drain::receive_next() {
  if (receive || open.sent < 0 || done()) return;
  if (buffer.size() == 0) buffer = Buffer(open.longest_bytes);
  receive = table.transport_.receive(open.from, open.tag, buffer.data(), buffer.size(), *this);
}

void WorkTable::Drain::ended(Ticket) {
  receive.reset();
  ++open.received;
  receive_next();
}

}  // namespace ringdl

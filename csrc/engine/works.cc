// The life of a work: started, stepped, finished or failed, and let go of when its messages have
// left.

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "engine/engine.h"

namespace ringdl {

// The first step hands the first messages to the channel, so that the header can carry one of them.
void Engine::start(const std::shared_ptr<Work>& work) {
  work->begin_ns = now_ns();
  in_flight_[work->key] = work;
  matching_.advance(work->key);
  ++inline_works_;
  const Matching::Parked parked = matching_.take(work->key);
  if (parked.failure) {
    fail(work, parked.failure);
    return;
  }
  if (step(work)) return;
  const bool none_has_joined = joined_.empty() && !joining_;  // they learn of it by the header
  work->keyed_channel->announce(none_has_joined && work->collective->greets_next());
  for (const Matching::Parked::Message& message : parked.messages) {
    if (work->ended()) break;
    apply(*work, message.from, message.head, message.description, message.payload.data());
  }
  if (!work->ended()) check_previous_left(work);
  progress();
}

// Whether the work has ended.
bool Engine::step(const std::shared_ptr<Work>& work) {
  if (work->collective->step(work->channel())) {
    finish(work);
    return true;
  }
  if (!work->polled && work->collective->pieces() >= 0) {
    work->polled = true;
    polled_.push_back(work);
  }
  return false;
}

// Whether anything has happened.
int Engine::step_polled() {
  int moved = 0;
  bool has_ended = false;
  for (size_t i = 0; i < polled_.size(); ++i) {
    const std::shared_ptr<Work> work = polled_[i];
    const int64_t before = work->ended() ? 0 : work->collective->pieces();
    if (work->ended() || step(work)) {
      has_ended = true;
      ++moved;
    } else if (work->collective->pieces() > before) {
      ++moved;
    }
  }
  if (has_ended) std::erase_if(polled_, [](const auto& work) { return work->ended(); });
  return moved;
}

// Steps what was touched until nothing is, then lets go of what has left. How many works moved
// without messages.
int Engine::settle() {
  const int moved = step_polled();
  while (!touched_.empty()) {
    const std::shared_ptr<Work> work = std::move(touched_.front());
    touched_.pop_front();
    work->touched = false;
    if (work->state.load(std::memory_order_relaxed) != Work::State::kRunning) continue;
    step(work);
  }
  std::erase_if(leaving_, [this](const auto& work) {
    if (!work->idle()) return false;
    release(*work);  // only now may its buffer go
    return true;
  });
  const size_t drained = std::erase_if(drains_, [this](const auto& drain) {
    if (!drain->done()) return false;
    tags_[static_cast<size_t>(drain->open.from)].give_back(drain->open.tag);
    return true;
  });
  if (drained == 0) return moved;
  for (const auto& [key, work] : in_flight_) {  // some may have found no tag
    if (work->keyed_channel) work->keyed_channel->route_waiting();
  }
  return moved;
}

void Engine::touch(Work& work) {
  if (work.touched) return;
  const auto found = in_flight_.find(work.key);
  if (found == in_flight_.end() || found->second.get() != &work) return;
  work.touched = true;
  touched_.push_back(found->second);
}

void Engine::finish(const std::shared_ptr<Work>& work) {
  if (work->keyed_channel) {
    work->keyed_channel->finish();
    --inline_works_;
  }
  in_flight_.erase(work->key);
  ++works_ended_;
  if (work->group->is_all()) ++common_works_ended_;
  record(*work);
  release(*work);
  work->state.store(Work::State::kDone, std::memory_order_release);
  if (work->key.space == KeySpace::kBucket) {
    const auto number = static_cast<int64_t>(work->key.hash);
    const auto found = buckets_.find(number);
    if (found != buckets_.end()) prepare_bucket(number, found->second);
  }
}

void Engine::record(const Work& work) {
  if (trace_.is_on()) trace_.add(event_of(work, now_ns()));
}

Trace::Event Engine::event_of(const Work& work, int64_t end_ns) {
  const std::string standing = work.collective->describe();
  const int64_t elements = has_uneven_rows(work.description.kind) ? 0 : work.description.count;
  const auto item = static_cast<int64_t>(item_bytes(work.description.dtype));
  const std::string algorithm = standing.substr(0, standing.find(':'));
  return {work.id, work.label(), algorithm, elements * item, work.begin_ns, end_ns};
}

// Lets go of what a work that has ended holds, however long its user keeps it.
void Engine::release(Work& work) {
  if (work.collective->gathered() == nullptr) work.collective.reset();
  work.memory.reset();
  if (work.keyed_channel) ended_.push_back(work.id);
  work.released.store(true, std::memory_order_release);
}

void Engine::fail(const std::shared_ptr<Work>& work, const Failure& why) {
  if (work->keyed_channel) {
    for (const KeyedChannel::OpenTag& open : work->keyed_channel->abort()) {
      drains_.push_back(std::make_unique<Drain>(*this, open, work->key));
      drains_.back()->receive_next();
    }
    --inline_works_;
  } else {
    work->bucket_channel->abort();
    const auto found = buckets_.find(static_cast<int64_t>(work->key.hash));
    if (found != buckets_.end()) found->second.failure = why.text;
  }
  in_flight_.erase(work->key);
  if (work->group->is_all()) ++common_works_ended_;
  record(*work);
  if (work->memory && work->collective->pieces() >= 0) {  // others may be writing there
    keep_for_good(work->memory);
  }
  if (work->idle()) {
    release(*work);
  } else {
    leaving_.push_back(work);
  }
  work->failure = why;
  work->state.store(Work::State::kFailed, std::memory_order_release);
}

void Engine::Drain::receive_next() {
  if (receive || open.sent < 0 || done()) return;
  if (buffer.size() == 0)
    buffer = Buffer(std::max(engine.options_.segment_bytes, kDoublingBytes) + 64);
  receive = engine.transport_->receive(open.from, open.tag, buffer.data(), buffer.size(), *this);
}

void Engine::Drain::ended(Ticket) {
  receive.reset();
  ++open.received;
  receive_next();
}

}  // namespace ringdl

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "engine/engine.h"

namespace ringdl {
namespace {

// The background thread sleeps so many times the CPU time that a look which found nothing took, so
// it never takes more than 3% of a core from those who compute.
constexpr int64_t kSleepPerLook = 32;
constexpr int64_t kShortestSleepNs = 50 * kMicrosecond;
constexpr int64_t kLongestSleepNs = 2 * kMillisecond;

// Without works in flight: often enough to answer a rank that asks why nothing moves.
constexpr auto kIdleSleep = std::chrono::milliseconds(100);

// MPI libraries take one message per look, or show it only at the next one: so many looks without a
// message mean that there is none.
constexpr int kFruitlessLooks = 3;

int64_t thread_cpu_ns() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return used.tv_sec * kSecond + used.tv_nsec;
}

}  // namespace

int Engine::progress() {
  ++polls_;
  const int moved = transport_->poll();
  settle();
  return moved;
}

// Steps what was touched until nothing is, then lets go of what has left.
void Engine::settle() {
  while (!touched_.empty()) {
    const std::shared_ptr<Work> work = std::move(touched_.front());
    touched_.pop_front();
    work->touched = false;
    if (work->state.load(std::memory_order_relaxed) != Work::State::kRunning) continue;
    if (work->collective->step(work->channel())) finish(work);
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
  if (drained == 0) return;
  for (const auto& [key, work] : in_flight_) {  // some may have found no tag
    if (work->keyed_channel) work->keyed_channel->route_waiting();
  }
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
  release(*work);
  work->state.store(Work::State::kDone, std::memory_order_release);
  if (work->key.space == KeySpace::kBucket) {
    const auto number = static_cast<int64_t>(work->key.hash);
    const auto found = buckets_.find(number);
    if (found != buckets_.end()) prepare_bucket(number, found->second);
  }
}

// Lets go of what a work that has ended holds, however long its user keeps it.
void Engine::release(Work& work) {
  if (work.allgather == nullptr) work.collective.reset();
  work.memory.reset();
  if (work.keyed_channel) ended_.push_back(work.id);
  work.released.store(true, std::memory_order_release);
}

void Engine::fail(const std::shared_ptr<Work>& work, const std::string& why) {
  if (work->keyed_channel) {
    for (const KeyedChannel::OpenTag& open : work->keyed_channel->abort()) {
      drains_.push_back(std::make_unique<Drain>(*this, open, work->key));
      drains_.back()->receive_next();
    }
    --inline_works_;
  } else {
    work->bucket_channel->abort();
    const auto found = buckets_.find(static_cast<int64_t>(work->key.hash));
    if (found != buckets_.end()) found->second.failure = why;
  }
  in_flight_.erase(work->key);
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
  if (buffer.size() == 0) buffer = Buffer(engine.options_.segment_bytes + 64);
  receive = engine.transport_->receive(open.from, open.tag, buffer.data(), buffer.size(), *this);
}

void Engine::Drain::ended(Ticket) {
  receive.reset();
  ++open.received;
  receive_next();
}

void Engine::handle(const ControlMessage& message) {
  const MessageHead& head = message.head;
  const std::string text(reinterpret_cast<const char*>(message.payload), head.payload_bytes);
  switch (head.type) {
    case MessageType::kSubmit:
    case MessageType::kData:
    case MessageType::kGrant:
    case MessageType::kClose: {
      if (const auto found = in_flight_.find(head.key); found != in_flight_.end()) {
        const std::shared_ptr<Work> work = found->second;
        apply(*work, message.from, head, message.description, message.payload);
      } else if (!submitted(head.key)) {
        Parked& parked = parked_[head.key];
        if (!parked.failure.empty()) break;
        parked.messages.push_back({message.from, head, message.description, {}});
        parked.messages.back().payload.assign(message.payload,
                                              message.payload + head.payload_bytes);
      } else if (head.type == MessageType::kGrant) {  // for a work that has failed here
        MessageHead close;
        close.type = MessageType::kClose;
        close.key = head.key;
        close.tag = head.tag;
        control_->send(message.from, close);
      } else if (head.type == MessageType::kClose) {
        for (const auto& drain : drains_) {
          if (drain->key != head.key || drain->open.from != message.from) continue;
          drain->open.sent = head.sequence;
          drain->receive_next();
        }
      }
      break;
    }
    case MessageType::kMismatch:
    case MessageType::kVerdict:
      fail_key(head.key, text, head.type == MessageType::kVerdict);
      break;
    case MessageType::kQuery:
      diagnosis_->on_query(message);
      break;
    case MessageType::kAnswer:
      diagnosis_->on_answer(message);
      break;
    case MessageType::kBlocked:
      diagnosis_->on_blocked(message);
      break;
    case MessageType::kBucketCount:
      left_launches_[static_cast<int64_t>(head.key.hash)] = head.value;
      break;
    case MessageType::kLeaving: {
      left_[static_cast<size_t>(message.from)] = true;
      std::vector<std::shared_ptr<Work>> works;
      for (const auto& [key, work] : in_flight_) works.push_back(work);
      for (const auto& work : works) check_previous_left(work);
      break;
    }
  }
}

void Engine::apply(Work& work, int from, const MessageHead& head, const Description& description,
                   const std::byte* payload) {
  if (!work.keyed_channel) return;
  switch (head.type) {
    case MessageType::kSubmit:
      compare(work, from, description);
      if (!work.ended() && head.flag != 0) {
        work.keyed_channel->deliver(from, 0, payload, head.payload_bytes);
      }
      break;
    case MessageType::kData:
      work.keyed_channel->deliver(from, head.sequence, payload, head.payload_bytes);
      break;
    case MessageType::kGrant:
      work.keyed_channel->grant(from, head.tag);
      break;
    case MessageType::kClose:
      work.keyed_channel->close(from, head.sequence);
      break;
    default:
      break;
  }
}

void Engine::compare(Work& work, int from, const Description& theirs) {
  const std::string differs = difference(theirs, from, work.description, rank_);
  if (differs.empty()) {
    work.keyed_channel->agree(theirs);
    return;
  }
  fail_everywhere(
      MessageType::kMismatch, work.key,
      "ranks disagree on " + work.label + ": " + differs + ". Pass the same on all ranks");
}

void Engine::fail_everywhere(MessageType type, const Key& key, const std::string& why) {
  for (int to = 0; to < size_; ++to) {
    if (to != rank_) tell_failure(to, type, key, why);
  }
  tell_failure(rank_, type, key, why);
}

void Engine::tell_failure(int to, MessageType type, const Key& key, const std::string& why) {
  const std::string text(cut_to_fit(why, kMaxPayloadBytes));
  if (to == rank_) {
    fail_key(key, text, type == MessageType::kVerdict);
    return;
  }
  MessageHead head;
  head.type = type;
  head.key = key;
  control_->send(to, head, nullptr, text.data(), text.size());
}

// A key that all ranks will submit in their time fails once they do; one that some rank never meant
// to submit is skipped there, so that all agree on which instance is next. Only the next one can be
// skipped: instances before it may be in flight elsewhere.
void Engine::fail_key(const Key& key, const std::string& why, bool skip) {
  transport_->expect_stray_messages();  // on a bucket's tags, to a rank that never launched it
  if (const auto found = in_flight_.find(key); found != in_flight_.end()) {
    const std::shared_ptr<Work> work = found->second;
    fail(work, why);
  } else if (submitted(key)) {
    return;  // another rank told the same before
  } else if (key.space == KeySpace::kBucket) {
    const auto bucket = buckets_.find(static_cast<int64_t>(key.hash));
    if (bucket == buckets_.end()) {  // not made yet, or not any more
      parked_[key] = {{}, why};
      return;
    }
    bucket->second.failure = why;
    if (bucket->second.prepared) bucket->second.prepared->bucket_channel->abort();
    bucket->second.prepared.reset();
  } else if (skip && key.instance == next_instance(key)) {
    ++next_instance(key);
    parked_.erase(key);
  } else {
    parked_[key] = {{}, why};
  }
}

void Engine::check_previous_left(const std::shared_ptr<Work>& work) {
  const int previous = (rank_ + size_ - 1) % size_;
  if (!left_[static_cast<size_t>(previous)] || work->ended()) return;
  if (work->keyed_channel) {
    if (work->keyed_channel->agreed()) return;
  } else {
    const auto launches = left_launches_.find(static_cast<int64_t>(work->key.hash));
    if (launches != left_launches_.end() && work->key.instance < launches->second) return;
  }
  fail_for_left(work->key, previous);
}

// Not a verdict: ranks that have not come to this key yet fail it when they do.
void Engine::fail_for_left(const Key& key, int left_rank) {
  const auto found = in_flight_.find(key);
  if (found == in_flight_.end()) return;
  fail_everywhere(MessageType::kMismatch, key,
                  "rank " + std::to_string(left_rank) + " has shut down without submitting " +
                      found->second->label + ", for which rank " + std::to_string(rank_) +
                      " waits. Have all ranks make the same calls before they end");
}

bool Engine::busy() const {
  return !in_flight_.empty() || keyed_work_is_leaving() || !drains_.empty() || !control_->idle();
}

void Engine::progress_in_background() {
  Lock lock(mutex_);
  int64_t pause = 0;
  int fruitless = 0;
  while (!stopping_) {
    const int64_t begin = thread_cpu_ns();
    int moved = 0;
    try {
      moved = progress();
    } catch (const std::exception& error) {
      broken_ = error.what();
      return;
    }
    fruitless = moved > 0 ? 0 : fruitless + 1;
    if (!busy() && fruitless >= kFruitlessLooks) {
      wake_.wait_for(lock, kIdleSleep, [this] { return stopping_ || awake_; });
      awake_ = false;
      pause = 0;
      fruitless = 0;
      continue;
    }
    if (fruitless < kFruitlessLooks) {
      pause = 0;
      lock.unlock();
      sched_yield();
    } else {
      const int64_t least = std::max(kShortestSleepNs, kSleepPerLook * (thread_cpu_ns() - begin));
      pause = std::clamp(2 * pause, least, std::max(least, kLongestSleepNs));
      if (waiters_ > 0) pause = std::max(pause, kLongestSleepNs);  // they look for themselves
      lock.unlock();
      sleep_ns(pause);
    }
    lock.lock();
  }
}

}  // namespace ringdl

#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "collective/collective.h"
#include "engine/channels.h"
#include "engine/failure.h"
#include "reduce/executor.h"

namespace ringdl {

/// One collective in flight on this rank. Shared by the engine, until it ends and its messages have
/// left, and by the threads that wait for it. Only the engine changes it.
class Work {
 public:
  enum class State : uint8_t { kPrepared, kRunning, kDone, kFailed };

  Work(uint64_t number, Key work_key, const Description& work_description, SharedGroup work_group)
      : id(number), key(work_key), description(work_description), group(std::move(work_group)) {}

  /// Its name in messages. Not stored: small allocations that stay between a framework's gradients
  /// fragment its memory.
  std::string label() const { return label_of(key, description, *group); }

  /// Whether it has ended, failed or not. Any thread, without the lock.
  bool ended() const {
    const State now = state.load(std::memory_order_acquire);
    return now == State::kDone || now == State::kFailed;
  }

  const uint64_t id;  // unique in its engine
  const Key key;
  const Description description;
  const SharedGroup group;
  int64_t begin_ns = 0;          // when it was submitted
  uint64_t flight = 0;           // see FlightRecorder::begin()
  bool names_no_sender = false;  // a receive from any rank, see AnyReceives
  std::atomic<int> sender = -1;  // once known, the member that it comes from
  std::atomic<State> state = State::kRunning;
  Failure failure;  // of kFailed
  /// It has ended and its messages have left: nothing reads or writes its buffer any more. Any
  /// thread.
  std::atomic<bool> released = false;
  /// Driver::take_ended() names it once it is released: its submitter keeps its arrays till then.
  bool is_named = false;
  /// It has failed, and other ranks may write to its buffer: it is not released before the engine
  /// closes. Any thread.
  std::atomic<bool> is_kept = false;

  std::shared_ptr<const void> memory;  // what it reads and writes, if that is not the caller's
  std::unique_ptr<Collective> collective;
  std::unique_ptr<KeyedChannel> keyed_channel;  // one of the two
  std::unique_ptr<BucketChannel> bucket_channel;
  bool touched = false;    // is in the engine's list of works to step
  bool polled = false;     // is in its list of works to step at each poll
  bool is_broken = false;  // and about to fail: see WorkTable::step()
  /// If it has failed: once this is done, nothing reads or writes its buffer.
  Executor::Ticket last_operation = Executor::kDone;

  Channel& channel() {
    if (keyed_channel) return *keyed_channel;
    return *bucket_channel;
  }
  bool idle() const { return keyed_channel ? keyed_channel->idle() : bucket_channel->idle(); }
};

}  // namespace ringdl

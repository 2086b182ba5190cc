#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "engine/channels.h"
#include "engine/control.h"
#include "engine/failure.h"
#include "engine/flight_recorder.h"
#include "engine/tags.h"
#include "engine/trace.h"
#include "engine/work.h"
#include "transport/transport.h"

namespace ringdl {

/// The works of one rank: made, begun, stepped, ended, and released once their messages have left.
///
/// A work that has begun is in flight until it finishes or fails. It is stepped when its channel
/// has touched it and, if it reduces in memory that other ranks write to or its executor answers
/// later, at each settle(). One that fails may leave messages and operations behind: its sends, and
/// the executor's operations, keep it from being released, and tags that it granted are drained
/// before they are granted again.
class WorkTable {
 public:
  using Works = std::unordered_map<Key, std::shared_ptr<Work>, KeyHash>;
  /// Called when a work has ended, with a failure or without.
  using OnEnd = std::function<void(const Work&, const Failure&)>;

  WorkTable(Transport& transport, ControlPlane& control, Executor& executor, const Clock& clock,
            OnEnd on_end);
  WorkTable(const WorkTable&) = delete;
  WorkTable& operator=(const WorkTable&) = delete;

  /// A work that is matched by its header.
  std::shared_ptr<Work> make_keyed(const Description& description, const Key& key,
                                   const SharedGroup& group);
  /// An instance of a bucket, which is prepared, not running, and whose messages have a tag.
  std::shared_ptr<Work> make_prepared(const Description& description, const Key& key,
                                      const SharedGroup& group, int tag);

  /// From now on it is in flight.
  void begin(const std::shared_ptr<Work>& work);
  /// Does what can be done now. If that fails for an array on a device, or for lack of memory, the
  /// work is broken: it is not stepped any more, and fails once its owner has notified the others.
  /// @returns whether the work has ended
  bool step(const std::shared_ptr<Work>& work);
  struct Broken {
    std::shared_ptr<Work> work;
    std::string why;
    FailureKind kind = FailureKind::kDevice;
  };
  bool has_broken() const { return !broken_.empty(); }
  /// Works that are broken since the last call.
  std::vector<Broken> take_broken() { return std::exchange(broken_, {}); }
  /// Steps what was touched until nothing is, then releases what has left.
  /// @returns how many works moved without messages
  int settle();
  /// How often a work has begun to be polled, reduced a piece in memory that other ranks write to,
  /// or ended: these may wait for that.
  uint64_t moves() const { return moves_; }
  void finish(const std::shared_ptr<Work>& work);
  void fail(const std::shared_ptr<Work>& work, const Failure& why);

  /// The work in flight under a key, or null.
  std::shared_ptr<Work> find(const Key& key) const;
  const Works& in_flight() const { return in_flight_; }
  bool is_empty() const { return in_flight_.empty(); }
  /// Whether no messages of failed works are still to be taken, or to leave. Those of buckets may
  /// have gone to a rank that never launches them: they do not count.
  bool is_drained() const;
  /// Whether further works send no payload before it is granted, as many are in flight: this bounds
  /// what peers park.
  bool has_many() const { return keyed_works_ >= kMostWithPayload; }

  /// A rank has reported how many messages it sent on the tag that a failed work granted, and how
  /// long the longest is.
  void on_closed(int from, const Key& key, int64_t sent, size_t longest_bytes);
  /// No more messages arrive from a rank.
  void forget_drains(int rank);

  /// take_released() is to name it, even if it is released already.
  void name(Work& work);
  /// Ids of works released since the last call, of those that are named.
  std::vector<uint64_t> take_released() { return std::exchange(released_, {}); }
  /// A call that was refused counts as a work, as it does on the other ranks.
  void count_refused() { ++common_ended_; }
  /// A work that ended before it was one: see Immediate::finish().
  void count_unseen();
  int64_t ended() const { return ended_; }
  /// Of those, the ones of all ranks.
  int64_t common_ended() const { return common_ended_; }
  const EngineCounters& counters() const { return counters_; }
  FlightRecorder& recorder() { return recorder_; }
  Trace& trace() { return trace_; }
  /// What has ended since the last call, and what has begun since and is in flight; nothing if
  /// nothing is recorded.
  std::vector<Trace::Event> take_trace();
  uint64_t next_id() { return next_id_++; }

  /// At the end: withdraws the receives of drained tags.
  void withdraw();
  /// The last thing: failed works and their memory go; or are kept for good, where the transport
  /// may still read that.
  void let_go();

  /// An event of a work that ends at `end_ns`; 0: it is in flight.
  static Trace::Event event_of(const Work& work, int64_t end_ns);

 private:
  static constexpr int64_t kMostWithPayload = 1024;

  // A tag of a failed work on which messages may still arrive.
  struct Drain final : public Completion {
    WorkTable& table;
    KeyedChannel::OpenTag open;
    Key key;
    Buffer buffer;
    std::optional<Ticket> receive;
    Drain(WorkTable& its_table, KeyedChannel::OpenTag tag, const Key& its_key)
        : table(its_table), open(tag), key(its_key) {}
    void ended(Ticket) override;
    void receive_next();
    bool done() const { return open.sent >= 0 && open.received >= open.sent; }
  };

  ChannelContext context(const SharedGroup& group);
  void touch(Work& work);
  int step_polled();
  void end(const std::shared_ptr<Work>& work, const Failure& why);
  void release(Work& work);
  bool is_idle(const Work& work) { return work.idle() && executor_.is_done(work.last_operation); }

  Transport& transport_;
  ControlPlane& control_;
  Executor& executor_;
  const Clock& clock_;
  const OnEnd on_end_;
  EngineCounters counters_;
  TagPools tags_;
  FlightRecorder recorder_;
  Trace trace_;
  Works in_flight_;
  std::deque<std::shared_ptr<Work>> touched_;
  std::vector<std::shared_ptr<Work>> polled_;  // they move without messages
  std::vector<Broken> broken_;
  std::vector<std::shared_ptr<Work>> leaving_;  // ended, but their messages have not
  // Failed works, and memory of such, which other ranks may write to. That is by mappings of their
  // own, so it need not stay mapped here; but nobody gets it again while this engine is there.
  std::vector<std::shared_ptr<Work>> kept_works_;
  std::vector<std::shared_ptr<const void>> kept_memory_;
  std::vector<std::unique_ptr<Drain>> drains_;
  std::vector<uint64_t> released_;
  uint64_t next_id_ = 1;
  uint64_t moves_ = 0;
  int64_t keyed_works_ = 0;  // in flight
  int64_t ended_ = 0;
  int64_t common_ended_ = 0;
};

}  // namespace ringdl

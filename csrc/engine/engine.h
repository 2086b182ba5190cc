#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/any_receives.h"
#include "engine/bucket_table.h"
#include "engine/call.h"
#include "engine/control.h"
#include "engine/diagnosis.h"
#include "engine/hosts.h"
#include "engine/immediate.h"
#include "engine/join_session.h"
#include "engine/matching.h"
#include "engine/membership.h"
#include "engine/planning.h"
#include "engine/tags.h"
#include "engine/watchdog.h"
#include "engine/work_table.h"
#include "transport/transport.h"

namespace ringdl {

struct EngineOptions {
  /// What travels and is reduced at once. The same on all ranks.
  size_t segment_bytes = 256 << 10;
  /// Messages of at most so many bytes travel as control messages; at most kMaxPayloadBytes.
  size_t inline_bytes = kMaxPayloadBytes;
  /// What copies and reduces payload; outlives the engine.
  Executor* executor = &cpu_executor();
};

/// The works of one rank of a communicator, and all that they need: its parts, put together.
///
/// An engine is polled by its owner, one thread at a time. It never waits, locks, starts a thread,
/// or reads another clock than the one that it is given. See Driver for one that does these things.
///
///     submit -> Matching (key, instance) -> Planning (a Collective) -> WorkTable (in flight)
///     poll   -> Transport -> ControlPlane -> Matching, WorkTable, ... -> works step and end
class Engine final : private Diagnosis::Owner, private JoinSession::Owner {
 public:
  Engine(std::unique_ptr<Transport> transport, EngineOptions options, const Clock& clock);
  /// Works still in flight are given up and their buffers no longer touched.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// All ranks, as a group.
  const SharedGroup& all() const { return all_; }

  /// Starts a work on `data`, which stays alive, unmoved and the work's own until that has ended:
  /// see Driver::submit().
  std::shared_ptr<Work> submit(const Call& call, void* data);
  /// See Driver::refuse().
  void refuse(const Call& call, const std::string& why);
  /// Begins the next instance of a bucket.
  std::shared_ptr<Work> launch_bucket(int64_t number);
  /// Forgets a bucket; an instance of it in flight fails on all ranks.
  void remove_bucket(int64_t number);

  /// Does what can be done now. @returns how much that was: 0 if nothing has moved
  int poll();
  /// Checks whether something is wrong, each part at its own interval. @returns what is to be
  /// printed
  std::string watch_over(int64_t now_ns);
  /// Finds, now and then, ranks that are no more, and tells the others. Works that these take part
  /// in fail on all ranks; those of other groups go on.
  void find_failed_ranks(int64_t now_ns);
  /// Whether there is something that poll() may move.
  bool is_busy() const;
  /// Whether the last polls have found no message. MPI libraries take one message per poll, or show
  /// it only at the next one: so many polls without a message mean that there is none.
  bool is_quiet() const { return quiet_polls_ >= kQuietPolls; }
  static constexpr int kQuietPolls = 3;

  /// A join session is over on this rank: answers the diagnosis' questions that were put off.
  void end_join(const std::shared_ptr<JoinSession::Session>& session);
  /// Tells the others that this rank submits nothing more.
  void leave() { membership_.departures().leave(clock_.now_ns()); }
  /// Whether all ranks have told so, and all messages have left.
  bool have_all_left() const {
    return membership_.departures().are_all_quiet() && control_->idle();
  }
  /// Whether all that this one tells has been sent.
  bool has_sent_all() const { return control_->idle(); }
  /// The end: gives up what is in flight, and lets go of the transport.
  void close();

  /// See Driver.
  void set_segment_bytes(size_t bytes);
  void set_watchdog(int64_t after_ns, bool dumps);
  /// All works in flight, a line each.
  std::string dump() const;
  std::map<std::string, double> stats() const;

  const Clock& clock() const { return clock_; }
  WorkTable& works() { return works_; }
  BucketTable& buckets() { return buckets_; }
  int64_t max_bucket() const { return buckets_.most(); }
  JoinSession& joining() { return joining_; }
  Membership& membership() { return membership_; }
  Planning& planning() { return planning_; }
  Immediate& immediate() { return immediate_; }
  Diagnosis& diagnosis() { return diagnosis_; }
  Watchdog& watchdog() { return watchdog_; }
  Hosts& hosts() { return hosts_; }
  const Hosts& hosts() const { return hosts_; }

 private:
  // For Diagnosis.
  bool is_ahead(const Key& key) const override;
  const std::vector<bool>& left() const override { return membership_.left(); }
  SharedGroup group_in_flight(const Key& key) const override;
  void fail_for_left(const Key& key, int left_rank) override;
  void send_verdict(int to, const Key& key, const std::string& why) override;

  // For what submits works of its own: Submitter, and JoinSession.
  Key next_key(const Call& call, const Group& group) override;
  Description header_of(const Call& call) override;
  uint32_t inline_bytes() const override;
  std::shared_ptr<Work> submit_as(const Key& key, const Call& call, const Description& description,
                                  void* data, std::shared_ptr<const void> memory) override;
  std::shared_ptr<Work> submit_begun(const Key& key, const Description& description,
                                     const SharedGroup& group,
                                     std::unique_ptr<Collective> collective,
                                     std::shared_ptr<const void> memory) override;
  void send_failure(int to, MessageType type, const Key& key, const Failure& why) override;
  void launch_bucket_for_others(int64_t number) override { launch_bucket(number); }

  // What control messages do: see messages.cc.
  void handle(const ControlMessage& message);
  void answer_query(const ControlMessage& message);
  void on_left(const std::vector<int>& ranks);
  void fail_rank(const Membership::Failed& failed);
  void apply(Work& work, int from, const MessageHead& head, const Description& description,
             const std::byte* payload);
  void compare(Work& work, int from, const Description& theirs);
  void fail_key(const Key& key, const Failure& why, bool skip);
  void fail_everywhere(const Work& work, const Failure& why);
  void check_previous_left(const std::shared_ptr<Work>& work);

  void begin(const std::shared_ptr<Work>& work);
  bool answers_later() const;
  void give_up() noexcept;

  const Clock& clock_;
  std::unique_ptr<Transport> transport_;
  const EngineOptions options_;
  const int rank_;
  const int size_;
  const SharedGroup all_;
  const TagLayout tags_;
  const std::shared_ptr<ControlPlane> control_;
  // The parts: see docs/architecture.md. Each refers to some of those above it.
  Matching matching_;  // which uses of each key were submitted, and what arrived for later ones
  Hosts hosts_;        // which ranks share memory
  Planning planning_;  // a call or a bucket -> a Collective
  WorkTable works_;    // in flight
  BucketTable buckets_;
  Immediate immediate_;       // allreduces that a caller polls itself
  Membership membership_;     // which ranks have left or failed
  AnyReceives any_receives_;  // receives that name no rank
  JoinSession joining_;       // answers for a rank that has joined
  Diagnosis diagnosis_;       // why nothing moves
  Watchdog watchdog_;
  std::vector<ControlMessage> queries_;  // of the diagnosis, to be answered later
  bool watchdog_dumps_ = false;
  int quiet_polls_ = 0;  // since the last message
  int64_t polls_ = 0;
};

}  // namespace ringdl

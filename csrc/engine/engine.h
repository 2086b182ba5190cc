#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>

#include "engine/call.h"
#include "engine/failures.h"
#include "engine/inbox.h"
#include "engine/parts.h"
#include "engine/submissions.h"

namespace ringdl {

/// The works of one rank of a communicator, and all that they need: its parts, put together.
///
/// An engine is polled by its owner, one thread at a time. It never waits, locks, starts a thread,
/// or reads another clock than the one that it is given. See Driver for one that does these things.
///
///     submit -> Submissions -> Matching (key, instance) -> Planning (a Collective) -> WorkTable
///     poll   -> Inbox       -> Matching, WorkTable, ... -> works step and end
class Engine {
 public:
  Engine(std::unique_ptr<Transport> transport, EngineOptions options, const Clock& clock);
  /// Works still in flight are given up and their buffers no longer touched.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return parts_.rank; }
  int size() const { return parts_.size; }
  Parts& parts() { return parts_; }
  const Parts& parts() const { return parts_; }

  /// Starts a work on `data`, which stays alive, unmoved and the work's own until that has ended:
  /// see Driver::submit().
  std::shared_ptr<Work> submit(const Call& call, void* data);
  /// See Driver::call_box().
  std::shared_ptr<Work> call_box(const BoxName& name, int to, std::unique_ptr<Collective> caller);
  /// See Driver::refuse().
  void refuse(const Call& call, const std::string& why);
  /// Begins the next instance of a bucket.
  std::shared_ptr<Work> launch_bucket(int64_t number);
  /// Instead: it fails on all ranks, for a reason of this one.
  void fail_bucket(int64_t number, const std::string& why);
  /// A work in flight fails on all ranks, for a reason of this one.
  void give_up(const Work& work, const std::string& why);
  /// Forgets a bucket; an instance of it in flight fails on all ranks.
  void remove_bucket(int64_t number);

  /// Does what can be done now.
  /// @returns  how much that was: 0 if nothing has moved
  int poll();
  /// How often something has moved beside messages: what the ranks of this host may wait for.
  uint64_t moves() const { return parts_.works.moves() + other_moves_; }
  /// Checks whether something is wrong, each part at its own interval.
  /// @returns  what is to be printed
  std::string watch_over(int64_t now_ns);
  /// Finds, now and then, ranks that are no more: see Failures.
  void find_failed_ranks(int64_t now_ns) { failures_.find_failed_ranks(now_ns); }
  /// Whether there is something that poll() may move, or somebody whom this rank answers.
  bool is_busy() const;
  /// See Inbox.
  bool is_quiet() const { return inbox_.is_quiet(); }

  /// A join session is over on this rank: answers the diagnosis' questions that were put off.
  void end_join(const std::shared_ptr<JoinSession::Session>& session);
  /// Tells the others that this rank submits nothing more.
  void leave() { parts_.membership.departures().leave(parts_.clock.now_ns()); }
  /// Whether all ranks have told so, and all messages have left.
  bool have_all_left() const;
  /// The end: gives up what is in flight, and lets go of the transport.
  void close();

  /// All works in flight, a line each.
  std::string dump() const;
  std::map<std::string, double> stats() const;

 private:
  void give_up() noexcept;
  void poll_beside();

  // What holds rules, not state, is made before the parts, and refers to them.
  Failures failures_{parts_};
  Inbox inbox_{parts_, failures_};
  Submissions submissions_{parts_, inbox_, failures_};
  Parts parts_;
  std::exception_ptr put_off_;
  int64_t polls_ = 0;
  uint64_t other_moves_ = 0;  // than those of works
};

}  // namespace ringdl

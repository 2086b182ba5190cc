#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "engine/bucket_table.h"
#include "engine/call.h"
#include "engine/hosts.h"
#include "engine/matching.h"
#include "engine/planning.h"
#include "engine/submitter.h"
#include "engine/work_table.h"

namespace ringdl {

/// What a rank does that has nothing more to submit while others have.
///
/// Each key's header goes to the next rank whatever the call is, so a joined rank is notified of
/// every call that the rank before it makes, or answers. (A header that would wait for data from
/// other ranks is sent at once if a rank has joined.) It answers by submitting the same with the
/// reduction's neutral element, or without rows, which notifies the next rank. Unnamed allreduces
/// would meet in slots: it passes the next one beforehand. Buckets have no headers: a rank that
/// joins notifies all others, and from then on they announce to it what they launch.
///
/// It ends with a meeting, an allreduce that each rank submits once its own works have ended. A
/// work ends on no rank before all have submitted it, so nothing is left to be answered then. What
/// a rank submits after the meeting may arrive before it has ended here: headers say how many
/// meetings there were.
class JoinSession {
 public:
  /// What it needs from its engine, beyond what parts that submit need.
  class Owner : public Submitter {
   public:
    virtual void launch_bucket_for_others(int64_t number) = 0;

   protected:
    ~Owner() = default;
  };

  JoinSession(WorkTable& works, Matching& matching, Planning& planning, BucketTable& buckets,
              Hosts& hosts, ControlPlane& control, const Clock& clock, Owner& owner,
              SharedGroup all);

  /// How often all ranks have joined.
  uint64_t meetings() const;
  /// Whether this rank has joined, and not all have yet.
  bool is_joined() const { return session_ != nullptr; }
  /// Whether some rank may have, so that headers go at once.
  bool may_have_joined() const { return is_joined() || !joined_.empty(); }
  /// @throws UsageError  this rank has joined
  void refuse_joined() const;

  /// Whether a joined rank answers allreduces alone, and fails all other calls.
  void answer_allreduces_only(bool only) { allreduces_only_ = only; }
  /// A group that this rank is a member of: calls of those that are known are answered.
  void know(const SharedGroup& group) { groups_[group->id] = group; }
  void forget_groups() { groups_.clear(); }

  /// From the call of join() until all ranks have made it.
  struct Session {
    std::vector<std::shared_ptr<Work>> own;  // works that were in flight before
    std::vector<int64_t> entry;              // input of the meeting: the greatest joined last
    std::shared_ptr<Work> meeting;
    uint64_t number = 0;      // of the meeting
    int64_t answered_ns = 0;  // when a call was answered last
    bool is_answering = false;
    std::vector<ControlMessage> queries;  // of the diagnosis, to be answered later
  };
  /// The session that this rank is in; begins one unless it is in one.
  std::shared_ptr<Session> begin();
  /// Whether all ranks have joined. Submits the meeting once it may.
  bool is_over(Session& session);
  /// What a session that is not over waits for.
  const Work& awaited(const Session& session) const;
  /// All have joined. Returns the questions that were put off.
  std::vector<ControlMessage> end(const std::shared_ptr<Session>& session);

  /// Answers what the others have called.
  /// @returns how many calls; the works begin at once, and end like any other
  int answer_calls();
  /// The asking rank concludes from what is missing, and headers may arrive after the question.
  void put_off(const ControlMessage& query) { session_->queries.push_back(query); }
  std::vector<ControlMessage> take_queries();

  /// Another rank has joined, for a meeting.
  void on_joined(int from, uint64_t meeting);
  /// This rank has launched a bucket.
  void on_launched(const Work& work);

 private:
  void answer(const Matching::Header& header);
  SharedGroup find_group(uint64_t id) const;
  void pass_next_in_slots();

  WorkTable& works_;
  Matching& matching_;
  Planning& planning_;
  BucketTable& buckets_;
  Hosts& hosts_;
  ControlPlane& control_;
  const Clock& clock_;
  Owner& owner_;
  const SharedGroup all_;
  std::shared_ptr<Session> session_;
  std::map<int, uint64_t> joined_;  // by rank: for which meeting, of those that may still wait
  std::map<uint64_t, SharedGroup> groups_;  // that this rank is, or was, a member of, by id
  int64_t works_before_ = 0;                // works of all ranks, when all last joined
  bool allreduces_only_ = false;
};

}  // namespace ringdl

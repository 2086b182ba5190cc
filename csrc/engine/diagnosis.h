#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/census.h"
#include "engine/control.h"
#include "engine/group.h"
#include "engine/wire.h"

namespace ringdl {

/// Finds out why nothing moves.
///
/// Three cases. A wait that nears its timeout counts the members of the group that have submitted
/// the key (Census), so that StallError can name those that have not. Once a rank has shut down,
/// ranks that are blocked count them, too; if a rank that has left answers that it never submitted
/// the key, the rank that asked fails it on all ranks (the next rank, which misses its header, asks
/// at once). And a *name* is called wrong only when ranks wait for one another: ranks that have
/// been blocked for a second notify rank 0; if some may wait for one another it asks about the keys
/// that they await, and sends the verdict on those on which ranks are stuck.
class Diagnosis final : private Census::Owner {
 public:
  /// What it needs from the engine that it belongs to.
  class Owner {
   public:
    /// Whether this rank has not submitted the key, and does not know it to fail.
    virtual bool is_ahead(const Key& key) const = 0;
    /// The group of a work in flight; else null.
    virtual SharedGroup group_in_flight(const Key& key) const = 0;
    /// By rank: has announced that it submits nothing more.
    virtual const std::vector<bool>& left() const = 0;
    /// The key, for which this rank waits, was not submitted by a rank that has left.
    virtual void fail_for_left(const Key& key, int left_rank) = 0;
    /// Notifies one rank, perhaps this one, that a key fails, and that it will not submit it.
    virtual void send_verdict(int to, const Key& key, const std::string& why) = 0;

   protected:
    ~Owner() = default;
  };

  Diagnosis(Owner& owner, Transport& transport, ControlPlane& control);

  /// A thread of this rank begins or ends a wait.
  /// @param for_good  whether it will submit nothing before the work has ended
  void wait_begins(const Key& key, const std::string& label, const SharedGroup& group,
                   bool for_good, int64_t now_ns);
  void wait_ends(const Key& key, int64_t now_ns);

  /// Called now and then by a thread that waits for the key.
  /// @param may_submit  whether another thread may still submit something
  void check(const Key& key, bool may_submit, int64_t now_ns);
  /// Called now and then on rank 0, whatever it does.
  void detect_stuck(int64_t now_ns);
  /// Called now and then on all ranks.
  void check_counts(int64_t now_ns) { census_.check(now_ns); }

  /// Counts the members of a group that have submitted a key. The findings are kept under the
  /// number that this returns.
  /// @param within_ns  time until they should be known
  uint32_t ask_all(const Key& key, const SharedGroup& group, int64_t within_ns, int64_t now_ns);
  /// Fails the key on all ranks if `rank`, which has left, never submitted it.
  void ask_who_left(const Key& key, int rank, int64_t now_ns);
  /// What StallError says about the answers so far.
  std::string answers(uint32_t question, int64_t now_ns) const;
  /// The lowest rank that is known to have submitted the key; -1 if none is.
  int first_submitted(uint32_t question) const;
  void forget(uint32_t question);

  void on_count(const ControlMessage& message, int64_t now_ns) {
    census_.on_query(message, now_ns);
  }
  void on_counted(const ControlMessage& message, int64_t now_ns) {
    census_.on_answer(message, now_ns);
  }
  /// These ranks have announced that they submit nothing more.
  void on_left(const std::vector<int>& ranks, int64_t now_ns) { census_.on_left(ranks, now_ns); }
  void on_query(const ControlMessage& message);
  void on_answer(const ControlMessage& message);
  void on_blocked(const ControlMessage& message, int64_t now_ns);

 private:
  struct Wait {
    Key key;
    std::string label;
    std::vector<int> ranks;       // that take part
    SharedGroup group = nullptr;  // of this rank's waits
    bool for_good = true;
  };
  struct Report {
    uint64_t serial = 0;  // 0: not known to be blocked
    Wait wait;
  };
  enum class Answer : uint8_t { kNotAsked, kNone, kMissing, kSubmitted };
  struct Question {
    Key key;
    std::vector<Answer> answers;  // by rank
    int64_t asked_ns = 0;
    bool for_verdict = false;
    bool ends_when_answered = false;
    SharedGroup counted = nullptr;  // if the census asks
  };

  bool is_ahead(const Key& key) const override { return owner_.is_ahead(key); }
  SharedGroup group_in_flight(const Key& key) const override { return owner_.group_in_flight(key); }
  void on_missing(const Key& key, int rank) override;

  std::vector<Answer> answers_to(const Question& question) const;
  uint32_t ask(const Key& key, const std::vector<int>& ranks, int64_t now_ns);
  void report(int rank, uint64_t serial, const Wait& wait, int64_t now_ns);
  void take(int rank, uint32_t number, bool submitted, uint64_t serial);
  void count_where_ranks_left(int64_t now_ns);
  std::vector<Wait> waits_that_may_be_stuck();
  void begin_round(int64_t now_ns);
  std::vector<bool> find_stuck(const std::vector<Question>& round) const;
  void end_round();

  Owner& owner_;
  Transport& transport_;
  ControlPlane& control_;
  const int rank_;
  const int size_;
  Census census_;
  std::vector<Wait> waits_;    // of this rank's threads
  uint64_t serial_ = 1;        // changes whenever a wait begins or ends
  int64_t since_ns_ = 0;       // when it changed last
  uint64_t sent_serial_ = 0;   // what was reported to rank 0
  uint64_t asked_serial_ = 0;  // for which ranks that had left were asked,
  int64_t asked_left_ = 0;     // and how many they were
  int64_t next_round_ns_ = 0;  // on rank 0

  std::vector<Report> reports_;  // on rank 0, by rank
  std::vector<uint32_t> round_;  // the questions of the running round
  int64_t round_begin_ns_ = 0;
  bool is_round_wanted_ = false;

  uint32_t next_question_ = 1;
  std::map<uint32_t, Question> questions_;
};

}  // namespace ringdl

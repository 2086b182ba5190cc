#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/wire.h"

namespace ringdl {

class Engine;
struct ControlMessage;

/// Finds out why nothing moves. All members are called with the engine's lock held.
///
/// Three cases. A wait that nears its timeout asks every rank whether it has submitted the key, so
/// that StallError can name those that have not. A rank that shuts down tells all; whoever is
/// blocked then asks about its key, and fails it on all ranks if a rank that has left never
/// submitted it (the next rank knows so without asking). And a *name* is called wrong only when
/// every rank is blocked in a wait and none of the awaited keys is submitted everywhere: ranks that
/// have been blocked for a second tell rank 0, which, once it has heard from all, asks all about
/// all awaited keys, and tells the verdict if every answer says so and nobody has moved on.
class Diagnosis {
 public:
  explicit Diagnosis(Engine& engine);

  /// A thread of this rank begins or ends a wait.
  void wait_begins(const Key& key, const std::string& label, int64_t now_ns);
  void wait_ends(const Key& key);

  /// Called now and then by waiting threads.
  void look(int64_t now_ns);

  /// Asks all ranks about a key. Answers are collected under the number that this returns.
  uint32_t ask_all(const Key& key, int64_t now_ns);
  /// What StallError says of the answers so far.
  std::string answers(uint32_t question, int64_t now_ns) const;
  void forget(uint32_t question) { questions_.erase(question); }

  void on_query(const ControlMessage& message);
  void on_answer(const ControlMessage& message);
  void on_blocked(const ControlMessage& message);

 private:
  struct Wait {
    Key key;
    std::string label;
  };
  struct Report {
    uint64_t serial = 0;  // 0: not blocked as far as known
    Wait wait;
  };
  enum class Answer : uint8_t { kNone, kMissing, kSubmitted };
  struct Question {
    Key key;
    std::vector<Answer> answers;
    int64_t asked_ns = 0;
    bool for_verdict = false;
  };

  void report(int rank, uint64_t serial, const Wait& wait);
  void take(int rank, uint32_t number, bool submitted, uint64_t serial);
  void ask_those_who_left(int64_t now_ns);
  void begin_round(int64_t now_ns);
  void end_round();

  Engine& engine_;
  std::vector<Wait> waits_;    // of this rank's threads
  uint64_t serial_ = 1;        // changes whenever a wait begins or ends
  int64_t since_ns_ = 0;       // when it changed last
  uint64_t told_serial_ = 0;   // what rank 0 has been told
  uint64_t asked_serial_ = 0;  // for which those who had left were asked,
  int64_t asked_left_ = 0;     // and how many these were
  std::vector<uint32_t> left_questions_;
  int64_t next_round_ns_ = 0;  // on rank 0

  std::vector<Report> reports_;  // on rank 0, by rank
  std::vector<uint32_t> round_;  // the questions of the running round
  bool round_spoiled_ = false;

  uint32_t next_question_ = 1;
  std::map<uint32_t, Question> questions_;
};

/// "rank 3", "ranks 1, 2 and 5", "ranks 0 to 6".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace ringdl

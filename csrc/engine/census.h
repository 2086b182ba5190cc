#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/control.h"
#include "engine/group.h"
#include "engine/wire.h"

namespace ringdl {

/// Which ranks of its group have submitted a key, as far as this rank knows.
enum class Standing : uint8_t { kUnknown, kMissing, kSubmitted };

/// Finds out which members of a group have submitted a key, with few messages however many ranks
/// ask.
///
/// The members that have submitted the key and whose work has not ended take part: they know the
/// group, count at once when asked, and mostly want the result, too. Each asks the members after
/// it, one, then two, then four, until one takes part; so a late rank is asked only by the one
/// before it, and if that is silent, by the one before that. Then each asks the last member that it
/// knows of, which takes part, what that one has found, and so knows of twice as many as before
/// (pointer jumping, Wyllie 1979). So with log2 P questions and as many answers each of P ranks
/// knows of all.
///
/// A question is answered once the receiver has found as many members as the rank that asks. A
/// member that is silent for a while is passed over, and an answer that arrives later still counts.
class Census {
 public:
  /// What it needs from the engine.
  class Owner {
   public:
    /// Whether this rank has not submitted the key, and does not know it to fail.
    virtual bool is_ahead(const Key& key) const = 0;
    /// The group of a work in flight; else null.
    virtual SharedGroup group_in_flight(const Key& key) const = 0;
    /// A rank has answered this one that it has not submitted the key.
    virtual void on_missing(const Key& key, int rank) = 0;

   protected:
    ~Owner() = default;
  };

  Census(Owner& owner, ControlPlane& control) : owner_(owner), control_(control) {}

  /// Counts the members of a group, unless that was begun a moment ago, here or elsewhere.
  /// @param patience_ns  how long to wait for a silent member
  void begin(const Key& key, const SharedGroup& group, int64_t patience_ns, int64_t now_ns) {
    begin(key, group, patience_ns, 0, now_ns);
  }
  /// Keeps the findings about a key, until as many calls of release().
  void keep(const Key& key) { ++counts_[key].kept; }
  void release(const Key& key);

  /// By member of the group; empty if nothing is known of the key.
  std::vector<Standing> standings(const Key& key) const;

  void on_query(const ControlMessage& message, int64_t now_ns);
  void on_answer(const ControlMessage& message, int64_t now_ns);
  /// Asks ranks that have left again about works in flight: what they answered before is not final.
  void on_left(const std::vector<int>& ranks, int64_t now_ns);
  /// Called now and then.
  void check(int64_t now_ns);

 private:
  // Members are counted from the one after this rank: offsets 1 to P-1.
  struct Member {
    int64_t asked_ns = 0;  // 0: not asked
    bool has_answered = false;
    bool takes_part = false;
  };
  struct Held {
    int rank;
    uint32_t number;
    int level;
  };
  struct Count {
    int kept = 0;
    SharedGroup group;       // null: not begun
    int64_t begun_ns = 0;    // by the first rank that did
    int64_t touched_ns = 0;  // when this rank, or another one, last asked
    int64_t patience_ns = 0;
    uint32_t number = 0;              // distinguishes its questions from earlier ones
    std::vector<Standing> standings;  // by member of the group
    std::vector<Member> members;      // by offset
    int asked = 0;                    // offsets 1 to asked
    int passed = 0;                   // offsets of which none takes part, after the last of ends
    /// By level: how many offsets are accounted for. The last of these takes part, or is the last.
    std::vector<int> ends;
    int64_t pulled_ns = 0;  // when that one was asked what it has found; 0: not yet
    std::vector<Held> held;

    int last() const { return group->size() - 1; }
    int accounted() const { return ends.empty() ? 0 : ends.back(); }
    bool is_complete() const { return accounted() == last(); }
    int member_at(int offset) const { return (group->rank + offset) % group->size(); }
    int rank_at(int offset) const { return group->ranks[static_cast<size_t>(member_at(offset))]; }
    int offset_of(int rank) const;
  };

  void begin(const Key& key, const SharedGroup& group, int64_t patience_ns, int64_t age_ns,
             int64_t now_ns);
  void ask(const Key& key, Count& count, int offset, int level, int64_t now_ns);
  void ask_more(const Key& key, Count& count, int64_t now_ns);
  void advance(const Key& key, Count& count, int64_t now_ns);
  bool find_next(const Key& key, Count& count, int64_t now_ns);
  void answer(const Key& key, const Count& count, const Held& to);
  void answer_held(const Key& key, Count& count);
  void note(Count& count, int member, Standing standing);

  Owner& owner_;
  ControlPlane& control_;
  std::unordered_map<Key, Count, KeyHash> counts_;
  uint32_t next_number_ = 1;
};

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "engine/matching.h"
#include "engine/membership.h"
#include "engine/submitter.h"
#include "engine/work.h"

namespace ringdl {

/// Which box of a rank is meant; those of one meaning have the same one on all ranks.
struct BoxName {
  std::string text;  // for people, and what boxes are told apart by
  SharedGroup group;
};

/// Answers the calls that are put in it.
class Box {
 public:
  virtual ~Box() = default;
  /// This rank's side of a call: a channel of two ranks, of which it is the second.
  /// @param from  a member of the box' group
  virtual std::unique_ptr<Collective> answer(int from) = 0;
  /// Called at each poll: goes on with what does not belong to a call any more.
  /// @returns how much that was
  virtual int step() { return 0; }
  /// Whether nobody calls any more.
  /// @param is_gone  whether a member answers and calls no more
  virtual bool is_over(const std::function<bool(int member)>& is_gone) const = 0;
};

/// Calls of other ranks that this one answers without having made them.
///
/// A rank opens a box, and members of a group put calls in it: each is a work of two ranks, the
/// caller and this one, and each has a state machine of its own for it. A rank's calls of one box
/// are begun in their order, and may be under way at once.
///
/// Memory is bounded: what waits here is a header, perhaps with a short first message, and a rank
/// has as many works in flight as Submissions allows; what is longer waits at the caller until the
/// answer receives it.
class Mailbox {
 public:
  Mailbox(Matching& matching, const Membership& membership, Submitter& submitter)
      : matching_(matching), membership_(membership), submitter_(submitter) {}

  /// Calls that have come before are answered, too.
  void open(const BoxName& name, std::shared_ptr<Box> box);
  size_t open_boxes() const { return boxes_.size(); }

  /// Puts a call in the box of another member.
  /// @param caller  this rank's side: a channel of two ranks, of which it is the first
  std::shared_ptr<Work> call(const BoxName& name, int to, std::unique_ptr<Collective> caller);

  /// A header was parked.
  void on_header(const Key& key) { are_headers_new_ |= key.space == KeySpace::kBox; }
  /// Whether some call has come that is not answered yet.
  bool has_new() const { return are_headers_new_ && !boxes_.empty(); }
  /// Begins to answer calls.
  /// @returns how many
  int step();
  void give_up() { boxes_.clear(); }

 private:
  struct Opened {
    BoxName name;
    std::shared_ptr<Box> box;
    std::vector<SharedGroup> pairs;  // with each member; null for this rank
  };

  Key next_key(const BoxName& name, const Group& pair) const;
  std::shared_ptr<Work> submit(const BoxName& name, const SharedGroup& pair,
                               std::unique_ptr<Collective> side,
                               std::shared_ptr<const void> memory);

  Matching& matching_;
  const Membership& membership_;
  Submitter& submitter_;
  std::vector<Opened> boxes_;
  bool are_headers_new_ = false;  // some were parked since step()
};

}  // namespace ringdl

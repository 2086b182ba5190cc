#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/control.h"

namespace ringdl {

/// Which ranks have shut down.
///
/// A rank that leaves notifies the next rank at once: that one misses its headers first. All others
/// are notified along a tree over the ranks, with rank 0 at the root: a rank reports what it knows
/// to its parent and its children, at once if no more can follow from its side of the edge (a
/// subtree has left, or all have), else after a moment, together with what arrives meanwhile. So if
/// all leave together each rank sends a message up and one to each child, and a rank that leaves
/// early is soon known everywhere.
///
/// What is behind an edge of the tree is reported over that edge alone, and each end knows when the
/// other has nothing left to report. Other messages may still be on their way: answers to what a
/// rank asked before it left. Sends may need the receiver to poll until they end, so no rank stops
/// before it is notified, up the tree and down again, that all that was sent has left.
class Departures {
 public:
  Departures(ControlPlane& control, int rank, int size);

  /// By rank: is known to have left.
  const std::vector<bool>& left() const { return left_; }
  bool has_left(int rank) const { return left_[static_cast<size_t>(rank)]; }

  /// This rank submits nothing more.
  void leave(int64_t now_ns);
  /// @returns  the ranks that were not known to have left
  std::vector<int> on_leaving(const ControlMessage& message, int64_t now_ns);
  /// Called now and then: notifies the neighbours.
  void check(int64_t now_ns);
  /// Whether all ranks are known to have left, and all that this one reports has been sent.
  /// Questions need no answer from then on.
  bool is_over() const;
  /// A neighbour in the tree has reported that all it sent has left; or has left and ended.
  void on_quiet(int from);
  /// Whether all ranks have: no more messages arrive.
  bool are_all_quiet() const { return are_all_quiet_; }
  /// What this rank, which has left, waits for, in words. All others wait for ranks that have not
  /// left: then the lowest of those that wait has words, the others none.
  std::string awaited() const;

 private:
  struct Neighbour {
    int rank;
    std::vector<bool> behind;  // the ranks that it reports
    std::vector<bool> knows;   // has reported it, or been notified of it
    int64_t due_ns = 0;        // when to report what it does not know
    bool is_pending = false;
    bool is_quiet = false;  // with all behind that edge
    int64_t sent_ns = 0;    // when last
  };

  int next() const { return (rank_ + 1) % size_; }
  int previous() const { return (rank_ + size_ - 1) % size_; }
  bool are_neighbours(int a, int b) const;
  void learn(const std::vector<int>& ranks, int64_t now_ns, std::vector<int>& newly_left);
  void notify(Neighbour& neighbour, int64_t now_ns);
  void send_quiet();
  void send_all_quiet();

  ControlPlane& control_;
  const int rank_;
  const int size_;
  std::vector<bool> left_;
  std::vector<bool> reported_;         // along the tree
  bool previous_has_reported_;         // to this rank directly
  std::vector<Neighbour> neighbours_;  // in the tree: the parent, if there is one, and the children
  bool is_quiet_ = false;              // this rank, and all below it
  bool are_all_quiet_ = false;
};

}  // namespace ringdl

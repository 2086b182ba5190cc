#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/departures.h"
#include "engine/failure.h"
#include "engine/group.h"
#include "engine/hosts.h"
#include "transport/transport.h"

namespace ringdl {

/// Which ranks are present: those that leave announce it (Departures), those that have failed are
/// detected.
class Membership {
 public:
  Membership(Transport& transport, ControlPlane& control, const Hosts& hosts);

  Departures& departures() { return departures_; }
  const Departures& departures() const { return departures_; }
  const std::vector<bool>& left() const { return departures_.left(); }
  bool has_left(int rank) const { return departures_.has_left(rank); }
  /// Whether this rank has left.
  bool is_leaving() const { return departures_.has_left(rank_); }

  using Failed = Transport::Lost;
  /// Called now and then by waiting threads. Finds ranks that have failed: at once those that
  /// cannot be reached, and at the second of two checks a second those whose processes have ended:
  /// the transport has lost them, or they ran on this host and the launcher goes on without them,
  /// as MPICH's may after an exit.
  /// @returns  those that were not known to have failed
  std::vector<Failed> find_failed(int64_t now_ns);

  /// A rank has failed.
  /// @returns  whether that is news: not of a rank that has left, or failed, before
  bool fail(Failed failed);
  bool has_failed(int rank) const;
  /// Whether a rank answers no message: it has left or failed.
  bool is_gone(int rank) const { return has_left(rank) || has_failed(rank); }

  /// Why works of a group cannot end; no failure if all its ranks are present.
  Failure failure_in(const Group& group) const;
  /// @throws RankFailedError  some rank has failed
  void refuse_failed() const;

 private:
  Transport& transport_;
  const Hosts& hosts_;
  const int rank_;
  const int size_;
  Departures departures_;
  std::map<int, int> missed_;   // ranks without a process: at how many checks
  std::vector<Failed> failed_;  // in the order in which that was found
  int64_t next_check_ns_ = 0;
};

}  // namespace ringdl

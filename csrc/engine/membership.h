#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/departures.h"
#include "engine/hosts.h"
#include "transport/transport.h"

namespace ringdl {

/// Which ranks are there: those that have left said so (Departures), those that have failed are
/// found out.
class Membership {
 public:
  Membership(Transport& transport, ControlPlane& control, const Hosts& hosts);

  Departures& departures() { return departures_; }
  const Departures& departures() const { return departures_; }
  const std::vector<bool>& left() const { return departures_.left(); }
  bool has_left(int rank) const { return departures_.has_left(rank); }
  /// Whether this rank has.
  bool is_leaving() const { return departures_.has_left(rank_); }

  /// Called now and then by whoever waits. Finds ranks that are no more: at once where the
  /// transport has lost them, and else those of this host whose processes have ended while the
  /// launcher goes on without them, as MPICH's may after an exit.
  /// @throws RankFailedError
  void look_for_failed(int64_t now_ns);

 private:
  Transport& transport_;
  const Hosts& hosts_;
  const int rank_;
  const int size_;
  Departures departures_;
  std::map<int, int> missed_;  // ranks without a process: at so many looks
  int64_t next_look_ns_ = 0;
};

}  // namespace ringdl

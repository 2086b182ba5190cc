#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/call.h"
#include "engine/matching.h"
#include "engine/membership.h"
#include "engine/submitter.h"
#include "engine/work_table.h"

namespace ringdl {

/// Receives that name no rank.
///
/// A message is a work of its two ends, and a receive that names no rank does not know which. It
/// waits under a key of its own until a header of such a message has arrived that no receive has
/// claimed, then submits that rank's next message, and ends with it. Headers are always accepted,
/// so nothing has to be requested. Ranks are served in turn, and each rank's messages in the order
/// in which it sent them; of several receives, the one submitted first is served first. A receive
/// that names a rank claims its next message at once, so it goes before those that wait.
class AnyReceives {
 public:
  AnyReceives(WorkTable& works, Matching& matching, const Membership& membership,
              Submitter& submitter);

  /// Submits a receive, which is in flight from then on.
  /// @param members  the call's group
  /// @throws UsageError  no other rank is in the group
  std::shared_ptr<Work> submit(const Call& call, void* data, const SharedGroup& members);
  /// A header was parked.
  void on_header() { are_headers_new_ = true; }
  /// @returns how many receives have found their message, or ended
  int step();
  bool is_empty() const { return receives_.empty(); }
  void give_up() { receives_.clear(); }

  /// Why a receive in flight fails after ranks have left: nothing while a remaining rank may send.
  Failure failure_by_leaving(const Work& work) const;

 private:
  struct Receive {
    std::shared_ptr<Work> work;  // what the caller waits for
    Call call;
    void* data;
    std::vector<SharedGroup> pairs;  // with each member; null for this rank
    std::shared_ptr<Work> message;   // once one has arrived
  };

  bool find_message(Receive& receive);

  WorkTable& works_;
  Matching& matching_;
  const Membership& membership_;
  Submitter& submitter_;
  std::deque<Receive> receives_;
  bool are_headers_new_ = false;  // some were parked since step()
  int last_sender_ = -1;          // the member that was received from last
};

}  // namespace ringdl

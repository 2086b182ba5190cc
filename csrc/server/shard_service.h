#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/buffer.h"
#include "engine/mailbox.h"
#include "server/board.h"
#include "server/remote_visit.h"
#include "server/shard.h"
#include "server/visit.h"
#include "transport/window.h"

namespace ringdl {

/// What a rank does for those of other hosts: a visit of its shard, or to note a clock.
///
/// What a call brings is collected in a stage, of the shard's size, before the shard is visited, so
/// that no lock is held while messages travel: a call has happened wholly, or not at all if its
/// caller ends in the middle. Calls have the stage in turn: others wait, also for a caller that is
/// stopped, and memory does not grow with them.
///
/// Threads: the engine's; leave() may be called by any.
class ShardService final : public Box {
 public:
  struct Place {
    std::shared_ptr<Clocks> clocks;
    std::optional<Shard> shard;               // this rank's
    std::shared_ptr<const std::byte> memory;  // of the shard
    std::shared_ptr<const Window> window;     // of its users; may be null
    int rank;
    std::vector<int> callers;  // members
    size_t segment_bytes;
  };

  /// @param members  of the group
  /// @param stage  of the shard's size
  ShardService(Place place, int members, Buffer stage);

  std::unique_ptr<Collective> answer(int from) override;
  int step() override;
  /// Once this rank and all callers have left.
  bool is_over(const std::function<bool(int member)>& is_gone) const override;
  void leave() { has_left_.store(true); }

 private:
  class Answer;

  const Place place_;
  Buffer stage_;
  std::deque<const void*> line_;   // for the stage: answers; the first one has it
  std::unique_ptr<Visit> orphan_;  // of a call that has failed: it has the stage
  std::vector<uint64_t> clocks_;   // the last of each member's, by its number
  std::vector<bool> have_left_;    // by member
  int steps_ = 0;                  // of the orphan, and those before
  std::atomic<bool> has_left_ = false;
};

}  // namespace ringdl

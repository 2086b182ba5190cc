#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/driver.h"
#include "engine/group.h"
#include "reduce/update.h"
#include "server/shard.h"
#include "server/visit.h"

namespace ringdl {

/// Parameters in shards that the ranks of a host read and change where they are.
///
/// The first `servers` members have a shard each, in memory that all members see. Whoever pushes or
/// fetches does it in its own thread: nobody serves. Updates of a shard are one after the other, in
/// the same order in all of its blocks, and a fetch sees a shard between two of them (see Visit).
///
/// Clocks say how many steps of a member are in the parameters. A member whose process has ended
/// does not count any more: what it had not pushed is lost, and nobody waits for it.
///
/// Where a process ends in the middle of a push, its update is in some blocks, and half in one.
///
/// Threads: one at a time, and none in a forked child. Collective: the constructor, then connect(),
/// with a barrier after it.
class ParameterServer {
 public:
  /// @param count  of all parameters, of one dtype
  /// @param servers  at most as many as members
  /// @throws UsageError  members share no memory, or the dtype is not updated
  /// @throws OutOfMemory
  ParameterServer(std::shared_ptr<Driver> driver, SharedGroup group, DType dtype, size_t count,
                  Update::Rule rule, int servers);
  /// Others may still use this rank's shard.
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// Where this rank's shard is, for the others; -1 if it has none.
  int64_t place() const { return place_; }
  /// @param places  of all members
  void connect(const std::vector<int64_t>& places);
  /// Which parameters a member's shard holds: begin and end.
  std::pair<size_t, size_t> part(int member) const;

  /// How long a call waits, and what is called ten times a second meanwhile, which may throw.
  struct Patience {
    int64_t timeout_ns;
    std::function<void()> interrupted = [] {};
  };

  /// Writes the shard of a member, while nobody else uses it.
  /// @param pieces  all parameters, in their order, in any memory; so in the calls below
  void fill(const std::vector<Piece>& pieces, int member);

  /// These throw StallError if a rank holds a block for too long.
  void push(const std::vector<Piece>& gradient, const Update& how, const Patience& patience);
  void fetch(const std::vector<Piece>& into, const Patience& patience);
  /// Moves parameters here and there towards one another: see pull_together().
  void pull(const std::vector<Piece>& parameters, double share, const Patience& patience);

  /// This rank has pushed so many steps; kEnded: it pushes no more.
  void set_clock(uint64_t steps) const { set_clock(group_->rank, steps); }
  /// The same for another member, which does not do so meanwhile.
  void set_clock(int member, uint64_t steps) const;
  static constexpr uint64_t kEnded = ~uint64_t{0};
  uint64_t clock(int member) const;
  /// Waits until all members have pushed so many steps.
  void wait_for(uint64_t steps, const Patience& patience) const;

 private:
  void visit(std::vector<Piece> pieces, const Visit::Action& action, const Patience& patience);
  int rank_of(int member) const { return group_->ranks[static_cast<size_t>(member)]; }
  bool has_ended(int member) const;
  bool is_forked() const;

  const std::shared_ptr<Driver> driver_;
  const SharedGroup group_;
  const std::shared_ptr<Window> window_;
  const size_t count_;
  const size_t shard_count_;  // parameters of all shards but the last ones
  const Update::Rule rule_;
  const DType dtype_;
  const int servers_;
  const int64_t process_;
  std::shared_ptr<std::byte> memory_;
  int64_t place_ = -1;
  std::vector<Shard> shards_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/driver.h"
#include "engine/group.h"
#include "reduce/update.h"
#include "server/board.h"
#include "server/pieces.h"
#include "server/request.h"
#include "server/shard.h"
#include "server/shard_service.h"

namespace ringdl {

/// Parameters in shards that ranks push to and fetch from, each when it wants to.
///
/// The first `servers` members have a shard each, in memory that the members of their host see:
/// these push and fetch in their own threads (see Visit). For others the shard's rank does it when
/// it is polled, in the background (see ShardService). Updates of a shard are one after the other,
/// in the same order in all of its blocks, and a fetch sees a shard between two of them.
///
/// Clocks say how many steps of a member are in the parameters. A member whose process has ended
/// does not count any more: what it had not pushed is lost, and nobody waits for it.
///
/// Where a process ends in the middle of a push, its update is in some blocks, and half in one, of
/// shards of its host.
///
/// Threads: one at a time, and none in a forked child. Collective: the constructor, then connect(),
/// with a barrier after it.
class ParameterServer {
 public:
  /// @param name  the same on all members, and of no other one
  /// @param count  of all parameters, of one dtype
  /// @param servers  at most as many as members
  /// @param ends_with_members  whether every call throws RankFailedError once a member has failed,
  /// for ranks that go on without it all together. Else what does not need it goes on
  /// @throws UsageError  the dtype is not updated; or members are on several hosts, and no thread
  /// answers in the background
  /// @throws OutOfMemory
  ParameterServer(std::shared_ptr<Driver> driver, std::string name, SharedGroup group, DType dtype,
                  size_t count, Update::Rule rule, int servers, bool ends_with_members = false);
  /// Others may still use this rank's shard.
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// Where this rank's memory is, for the others of its host.
  int64_t place() const { return place_; }
  /// @param places  of all members
  void connect(const std::vector<int64_t>& places);
  /// All shards but the last ones hold a multiple of so many parameters.
  static constexpr size_t kMultiple = 64;
  /// Which parameters a member's shard holds: begin and end.
  std::pair<size_t, size_t> part(int member) const;

  /// How long a call waits, and what is called ten times a second meanwhile, which may throw.
  struct Patience {
    int64_t timeout_ns;
    std::function<void()> interrupted = [] {};
  };

  /// These throw StallError if a rank holds a block, or does not answer, for too long, and
  /// RankFailedError if one with a shard on another host has ended. The rest may have happened.
  /// Writes the shard of a member, while nobody else uses it.
  /// @param pieces  all parameters, in their order, in any memory; so in the calls below
  void fill(const std::vector<Piece>& pieces, int member, const Patience& patience);
  /// @param member  whose shard is meant, and its parameters alone; of these calls, all by default
  void push(const std::vector<Piece>& gradient, const Update& how, const Patience& patience,
            std::optional<int> member = {});
  void fetch(const std::vector<Piece>& into, const Patience& patience,
             std::optional<int> member = {});
  /// Moves parameters here and there towards one another: see pull_together().
  void pull(const std::vector<Piece>& parameters, double share, const Patience& patience,
            std::optional<int> member = {});

  /// This rank has pushed so many steps; kEnded: it pushes no more. Other hosts are told soon; one
  /// that does not answer, once it does and this rank makes another call here.
  void set_clock(uint64_t steps);
  static constexpr uint64_t kEnded = ~uint64_t{0};
  /// Another member pushes no more, as all members of this host note.
  void end_clock(int member);
  /// Waits until other hosts know this rank's clock.
  void flush_clock(const Patience& patience);
  uint64_t clock(int member) const { return clocks_->of(member); }
  /// Waits until all members have pushed so many steps.
  void wait_for(uint64_t steps, const Patience& patience);

 private:
  /// @param servers  whose shards
  void visit(const Request& request, const std::vector<Piece>& pieces,
             const std::vector<int>& servers, const Patience& patience);
  std::shared_ptr<Work> call(int member, const Request& request,
                             const std::vector<Piece>& pieces = {});
  void wait_for_answer(int member, const std::shared_ptr<Work>& work, const Patience& patience);
  void refuse_forked() const;
  void look_for_failures();
  void tell(int member);
  void tell_late();
  void help();
  std::vector<int> servers_or(std::optional<int> member) const;
  Shard::Shape shape_of(int member) const;
  int rank_of(int member) const { return group_->ranks[static_cast<size_t>(member)]; }
  bool is_remote(int member) const;
  bool has_ended(int member) const;
  bool is_forked() const;

  const std::shared_ptr<Driver> driver_;
  const BoxName name_;
  const SharedGroup group_;
  const SharedLayout layout_;
  const std::shared_ptr<Window> window_;
  const size_t count_;
  const size_t shard_count_;  // parameters of all shards but the last ones
  const Update::Rule rule_;
  const DType dtype_;
  const int servers_;
  const bool ends_with_members_;
  int64_t looked_ns_ = 0;  // for failures
  const int64_t process_;
  const size_t segment_bytes_;  // as all ranks have it, whatever is chosen later
  std::shared_ptr<std::byte> memory_;
  int64_t place_ = 0;
  std::map<int, Shard> shards_;  // of this host, by member
  std::vector<Board> boards_;    // the same, of all its members
  const std::shared_ptr<Clocks> clocks_;
  std::vector<int> remote_;                // members on other hosts
  Buffer stage_;                           // until connect()
  std::shared_ptr<ShardService> service_;  // for these; null if there are none
  struct Told {
    std::deque<std::shared_ptr<Work>> calls;  // under way
    bool is_late = false;                     // the newest clock is not among them
  };
  std::map<int, Told> told_;  // what members on other hosts are told of this rank's clock
  uint64_t clocks_told_ = 0;
};

}  // namespace ringdl

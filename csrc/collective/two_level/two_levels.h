#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "collective/collective.h"
#include "collective/messages/barrier.h"
#include "collective/messages/ring_blocks.h"
#include "collective/messages/ring_reduce_scatter.h"
#include "collective/partition.h"
#include "collective/shared/host_exchange.h"
#include "collective/sub_channel.h"
#include "reduce/executor.h"
#include "transport/window.h"

namespace ringdl {

/// Several hosts with equally many ranks, which share memory with the others of their host. Ranks
/// are counted host by host: those of host h are h * per_host and the following ones.
struct Levels {
  /// From this total of all ranks on, two levels are faster than one ring.
  static constexpr size_t kLeastBytes = 64 << 10;

  std::shared_ptr<Window> window;  // reaches the ranks of this host
  std::vector<int> ranks;          // the transport's number of each rank
  int per_host = 1;

  int hosts() const { return static_cast<int>(ranks.size()) / per_host; }
  /// The k-th ranks of all hosts, or all ranks of a host.
  std::vector<int> lane_of(int rank) const;
  std::vector<int> local_ranks(int rank) const;
  /// An exchange among the ranks of this host.
  std::unique_ptr<HostExchange> exchange(Executor& executor, const char* name, int rank,
                                         Exchange what) const;
};

/// Passes each rank's block to all: around the ring of the k-th ranks of all hosts, and from each
/// to the other ranks of its host, one host's blocks while the next arrive. So each byte crosses a
/// host's link once, as with one rank per host. All ranks are known to agree.
class TwoLevelBlocks final : public Collective {
 public:
  /// @param data, blocks  as in RingBlocks
  TwoLevelBlocks(Executor& executor, Levels levels, std::byte* data, std::vector<Span> blocks,
                 int rank, size_t segment_bytes);

  bool step(Channel& channel) override;
  int64_t pieces() const override;
  std::string describe() const override;

 private:
  std::unique_ptr<HostExchange> exchange_of(int host) const;

  Executor& executor_;
  const Levels levels_;
  std::byte* const data_;
  const std::vector<Span> blocks_;
  const int rank_;
  SubChannel lane_;
  SubChannel local_;
  RingBlocks ring_;
  bool has_begun_ = false;
  bool ring_is_done_ = false;
  int exchanged_ = 0;  // hosts whose blocks have arrived
  std::unique_ptr<HostExchange> exchange_;
  int64_t moved_ = 0;  // by exchanges that have ended
};

/// Reduce-scatter: first over each host, so that its k-th rank has the host's sums of the chunks of
/// all k-th ranks, then around the ring of these. So each byte crosses a host's link as often as
/// with one rank per host.
///
/// While two ranks disagree, no rank finishes or reads another's memory: a barrier comes first.
class TwoLevelReduceScatter final : public Collective {
 public:
  /// @param data, output, chunks, segment_bytes  as in RingReduceScatter
  /// @param reduce_many  over a host; does not divide
  /// @param reducer  around the ring; divides by the number of all ranks
  TwoLevelReduceScatter(Executor& executor, Levels levels, const std::byte* data, std::byte* output,
                        std::vector<Span> chunks, ReduceMany reduce_many, Reducer reducer, int rank,
                        size_t segment_bytes);

  bool step(Channel& channel) override;
  int64_t pieces() const override;
  std::string describe() const override;

 private:
  bool reduce_on_host(Channel& channel);

  Executor& executor_;
  const Levels levels_;
  const std::byte* const data_;
  std::byte* const output_;
  const std::vector<Span> chunks_;
  const ReduceMany reduce_many_;
  const Reducer reducer_;
  const int rank_;
  const size_t segment_bytes_;
  SubChannel lane_;
  SubChannel local_;
  Barrier barrier_;
  bool all_agree_ = false;
  std::vector<Span> lane_chunks_;  // of sums_, by host
  Buffer sums_;                    // of this host
  int reduced_ = 0;                // hosts whose chunks are reduced
  std::unique_ptr<HostExchange> exchange_;
  int64_t moved_ = 0;
  std::optional<RingReduceScatter> ring_;
};

}  // namespace ringdl

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/host_layout.h"
#include "collective/operations.h"
#include "collective/partition.h"
#include "collective/shared/shared_counters.h"
#include "collective/sub_channel.h"

namespace ringdl {

/// Where the ranks of a host have an array, or stages for it if some arrays are out of the others'
/// reach.
struct LocalArrays {
  SharedArrays shared;  // arrays or stages, by place on the host
  std::byte* own;       // this rank's array
  bool are_stages;
};

/// Allreduce over several hosts with several ranks each, through memory that the ranks of a host
/// share.
///
/// The array is cut into a part per lane. Lane k is a ring over the k-th rank of each host, or, of
/// many hosts, a grid (GridAllreduce), unless elements are encoded for the way. It reduces part k
/// over its host, then around the ring; the other ranks of the host copy it from there. So each
/// byte crosses a host's link as often as with one rank per host. Parts are cut into slabs, and
/// while one is on its way around the ring, the next is reduced and the one before is copied, piece
/// by piece, so that no message waits for long.
class HierarchicalAllreduce final : public Collective {
 public:
  /// How many columns the grid of so many hosts has; all of them: they are a ring.
  static int columns_of(int hosts);

  /// Bytes of each rank's stage.
  static size_t stage_bytes(size_t bytes, const HostLayout& layout);

  /// @param instance  how often these counters were used before, by all ranks; stages: 0
  /// @param reduce_many  over the ranks of a host; does not divide
  /// @param reducer  around the ring; divides by the number of all ranks
  HierarchicalAllreduce(Executor& executor, SharedLayout layout, LocalArrays local,
                        uint64_t instance, size_t bytes, ReduceMany reduce_many, Reducer reducer,
                        size_t segment_bytes, Codec codec);

  bool step(Channel& channel) override;
  int64_t pieces() const override { return moved_; }
  std::string describe() const override;

 private:
  bool is_leader() const { return layout_->local_rank < lanes_; }
  uint64_t count(int slabs) const {
    return instance_ * static_cast<uint64_t>(slabs_.segments()) + static_cast<uint64_t>(slabs);
  }
  std::byte* at(int local_rank, int lane, int slab) const;
  Span span_of(int piece, int lane, int slab) const;
  void arrive();
  bool copy_in();
  bool reduce_next();
  Executor::Ticket copy_piece_in(int slab, int lane, int piece);
  Executor::Ticket reduce(int slab, int piece);
  std::unique_ptr<Collective> ring_of(int slab) const;
  void go_round(Channel& channel);
  bool copy_out(int lane);
  int copied_by_this_rank();
  bool all_have_copied(int slabs) const;

  Executor& executor_;
  const SharedLayout layout_;
  const LocalArrays local_;
  const SharedCounters counters_;
  const uint64_t instance_;
  const ReduceMany reduce_many_;
  const Reducer reducer_;
  const size_t segment_bytes_;
  const Codec codec_;
  const int lanes_;
  const Partition slabs_;  // one chunk per lane
  const size_t piece_bytes_;
  const int pieces_;  // of each slab
  const bool streams_;
  Operations copies_in_;                // of pieces, by slab and lane
  int64_t copied_in_ = 0;               // of them, done
  int in_ = 0;                          // slabs that the others see
  Operations reductions_;               // of pieces of the own lane, in order
  int64_t reduced_ = 0;                 // of them, done
  int around_ = 0;                      // slabs that have been around the ring
  std::vector<Operations> copies_out_;  // of pieces, by lane
  int notified_copied_ = 0;
  std::unique_ptr<Collective> ring_;  // of slab around_
  SubChannel lane_;
  int64_t moved_ = 0;
};

}  // namespace ringdl

#pragma once

#include "base/buffer.h"
#include "collective/algorithm.h"
#include "collective/collective.h"
#include "collective/operations.h"
#include "collective/partition.h"

namespace ringdl {

/// Reduces `data` over all ranks, in place, so that every rank ends with the same bits.
///
/// Reduce-scatter followed by allgather around the ring (Patarasuk & Yuan 2009, "Bandwidth optimal
/// all-reduce algorithms for clusters of workstations"): each rank sends 2(P-1)/P of the data, the
/// least that any algorithm can do with. The sum of a chunk is taken in the order of the ring, so
/// it depends only on the size and the partition.
class RingAllreduce final : public Collective {
 public:
  /// Segments that may be on their way towards this rank at once. Two keep the link busy while one
  /// is reduced; the others cover the time in which the peers are not scheduled.
  static constexpr int kDepth = 4;

  /// @param data   `bytes` bytes, this rank's contribution and then the result; the caller's
  /// @param segment_bytes  what is sent and reduced at once; the same on all ranks
  /// @param codec  the same on all ranks. Partial sums keep the width of elements; the result is
  /// rounded to what the wire carries, on its owner, too
  RingAllreduce(Executor& executor, std::byte* data, size_t bytes, Reducer reducer, int rank,
                int size, size_t segment_bytes, Codec codec = {});

  void prepare(Channel& channel) override;
  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  bool reduces(int64_t message) const { return message < messages_ / 2; }
  Span sent_span(int64_t message) const;
  Span received_span(int64_t message) const;
  std::byte* slot(int64_t message) {
    return scratch_.data() + static_cast<size_t>(message % kDepth) * slot_bytes_;
  }
  std::byte* packed(int64_t message) {  // a sent one
    return packed_.data() + static_cast<size_t>(message % (2 * kDepth)) * slot_bytes_;
  }
  Executor::Ticket take(int64_t message);
  bool post_receives(Channel& channel);
  bool take_received(Channel& channel);
  bool post_sends(Channel& channel);
  bool launch(Channel& channel);

  Executor& executor_;
  std::byte* data_;
  Reducer reducer_;
  int rank_;
  int size_;
  Partition partition_;
  int64_t messages_;      // that this rank sends, and receives
  int64_t posted_ = 0;    // receives
  int64_t taken_ = 0;     // received messages that are in `data_`, counted in order
  Operations takes_;      // that put them there
  Operations packs_;      // of what is sent
  int64_t launched_ = 0;  // sends
  Codec codec_;
  size_t slot_bytes_;
  Buffer scratch_;
  Buffer packed_;    // with a codec: what is on its way to the next rank,
  Buffer unpacked_;  // and one segment
};

extern const AllreduceAlgorithm kRingAlgorithm;

}  // namespace ringdl

#pragma once

#include <vector>

#include "base/buffer.h"
#include "collective/collective.h"
#include "collective/operations.h"
#include "collective/partition.h"

namespace ringdl {

/// Reduces `data` over all ranks so that rank r ends with chunk r, in `output`.
///
/// The first half of the ring allreduce (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce
/// algorithms for clusters of workstations"), out of place: each rank sends every chunk but its own
/// once, (P-1)/P of the data. Chunk c is summed in the order of the ranks c+1, c+2, ..., c, so the
/// bits depend only on the size and the chunks. Needs scratch for kGroup + kDepth segments.
///
/// No rank can finish while two disagree: the last message of the last step has passed all other
/// ranks, one after the other, and each took it only from a neighbour that agrees.
class RingReduceScatter final : public Collective {
 public:
  /// @param data     all chunks; the caller's, only read
  /// @param output   this rank's chunk; the caller's, must not overlap `data`
  /// @param chunks   where each rank's is in `data`: whole items, the same on all ranks
  /// @param segment_bytes  what is sent and reduced at once, at most; the same on all ranks
  RingReduceScatter(Executor& executor, const std::byte* data, std::byte* output,
                    std::vector<Span> chunks, Reducer reducer, int rank, size_t segment_bytes);

  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  /// Segments that may be on their way towards this rank at once.
  static constexpr int64_t kDepth = 4;
  /// Segments of one chunk that go round the ring together. The time to send them hides the time in
  /// which one of them reaches the next rank and is added; more only cost scratch.
  static constexpr int64_t kGroup = 8;

  int step_of(int64_t message) const { return static_cast<int>(message / group_ % (size_ - 1)); }
  bool is_last_step(int64_t message) const { return step_of(message) == size_ - 2; }
  Span span(int distance_back, int64_t message) const;
  std::byte* slot(int64_t message) {
    return scratch_.data() + static_cast<size_t>(message % slots_) * segment_bytes_;
  }
  std::byte* target(int64_t message);
  bool post_receives(Channel& channel);
  bool post_sends(Channel& channel);
  bool take_received(Channel& channel);

  Executor& executor_;
  const std::byte* data_;
  std::byte* output_;
  std::vector<Span> chunks_;
  Reducer reducer_;
  int rank_;
  int size_;
  int64_t group_ = 1;         // segments of a chunk in each group
  size_t segment_bytes_ = 0;  // of all but the last ones of a chunk
  int64_t messages_ = 0;      // that this rank sends, and receives
  int64_t slots_ = 0;
  int64_t posted_ = 0;    // receives
  int64_t taken_ = 0;     // received messages to which this rank's part is added, in order
  Operations takes_;      // that add it; or the copy, if there is no other rank
  int64_t launched_ = 0;  // sends
  Buffer scratch_;
};

}  // namespace ringdl

#pragma once

#include <vector>

#include "base/buffer.h"
#include "collective/algorithm.h"
#include "collective/collective.h"
#include "reduce/executor.h"

namespace ringdl {

/// Reduces `data` over all ranks, in place, so that every rank ends with the same bits. For small
/// arrays, whose time depends on the number of successive messages, not on their length.
///
/// Recursive doubling (Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication
/// Operations in MPICH"): log2(P) rounds in which partners exchange all they have. If P is no power
/// of two, the ranks beyond the next lower power first hand their arrays to a neighbour and get the
/// result from it last. An array of up to a segment is one message. Needs scratch for one array per
/// round, so that all receives are posted at once. Reduces whole arrays, never a part of one.
///
/// Ranks that combine the same two parts put the lower ranks' part on the left. The last round
/// divides; all ranks but those that are handed the result take part in it. So bits are equal even
/// where the order of operands or a second rounding would show.
///
/// No rank can finish while two disagree: each result holds the part of every rank, and has passed
/// only edges whose two ends agree.
class RecursiveDoubling final : public Collective {
 public:
  /// @param data  `bytes` bytes, this rank's contribution and then the result; the caller's
  /// @param segment_bytes  the most in one message; the same on all ranks
  RecursiveDoubling(Executor& executor, std::byte* data, size_t bytes, Reducer reducer, int rank,
                    int size, size_t segment_bytes);

  /// Segments that may be on their way to or from a partner at once, as in RingAllreduce.
  static constexpr int64_t kDepth = 4;

  void prepare(Channel& channel) override;
  bool greets_next() const override;
  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  bool hand_in(Channel& channel);
  bool exchange(Channel& channel);
  bool hand_out(Channel& channel);
  void send_more(Channel& channel, int to, const std::byte* data);
  void receive_more(Channel& channel, int from, std::byte* data, int64_t& posted) const;
  bool has_sent(Channel& channel, int to) const { return channel.sent(to) == segments_; }
  bool has_received(Channel& channel, int from) const {
    return channel.received(from) == segments_;
  }
  std::byte* slot(size_t round) { return scratch_.data() + round * slot_bytes_; }

  Executor& executor_;
  std::byte* data_;
  size_t bytes_;
  Reducer reducer_;
  int rank_;
  int size_;
  bool hands_in_ = false;      // to rank_ + 1, which hands out to this rank
  bool hands_out_ = false;     // to rank_ - 1, which has handed in
  std::vector<int> partners_;  // whose parts this rank adds, in this order
  size_t segment_bytes_;
  int64_t segments_;  // of the array, and messages to or from a partner
  size_t slot_bytes_;
  Buffer scratch_;
  std::byte* current_;  // this rank's sum so far: `data_`, or the slot of the last round
  bool prepared_ = false;
  int64_t launched_ = 0;                         // sends of this round
  std::vector<int64_t> posted_;                  // receives, by round
  int64_t collected_ = 0;                        // receives of the result that is handed out
  size_t round_ = 0;                             // partners whose parts are added, in order,
  Executor::Ticket combined_ = Executor::kDone;  // once this is done
  bool copies_ = false;
};

extern const AllreduceAlgorithm kDoublingAlgorithm;

}  // namespace ringdl

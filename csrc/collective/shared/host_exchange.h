#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/messages/bruck.h"
#include "collective/operations.h"
#include "collective/partition.h"
#include "collective/shared/shared_counters.h"
#include "transport/window.h"

namespace ringdl {

/// What a rank gives and gets in an exchange.
struct Exchange {
  const std::byte* data = nullptr;  // what it gives, `bytes` bytes; the caller's, only read
  size_t bytes = 0;
  std::vector<Span> parts;                // of `data`, by rank: what each takes
  bool is_same = false;                   // all ranks that take anything take the same part
  std::optional<ReduceMany> reduce_many;  // reduces what is taken, as much from each rank
  /// Where it puts what it takes, in rank order unless reduced; the caller's. Null: see gathered().
  std::byte* output = nullptr;
  std::vector<size_t> begins = {};  // in `output`, by rank, if not in rank order
};

/// An exchange among ranks that all share memory: each announces its array to the others, in few
/// messages (Bruck), and takes its part of theirs. Arrays in shared memory are read in place: one
/// copy, the minimum. Those that only their owners reach go through stages, block by block.
///
/// Broadcast, allgather, alltoall and reduce-scatter differ only in which rank takes what.
/// Reductions are as in DirectAllreduce: in rank order, 16-bit floats rounded once.
///
/// No rank can finish while two disagree: each needs the announcements of all others, and takes
/// nothing from a rank that it disagrees with. A rank is done once all have what they take from it.
class HostExchange final : public Collective {
 public:
  /// Smaller arrays, if all ranks know their size, go faster by messages: up to 2 KiB are sent with
  /// the headers.
  static constexpr size_t kLeastBytes = 4 << 10;

  /// @param name  for describe()
  /// @param window  reaches all ranks
  /// @param ranks  the transport's number of each rank
  /// @param rank  which of them this one is
  HostExchange(Executor& executor, std::string name, std::shared_ptr<Window> window,
               std::vector<int> ranks, int rank, Exchange exchange);
  ~HostExchange() override;

  bool step(Channel& channel) override;
  int64_t pieces() const override { return has_met_ ? moved_ : -1; }
  Gathered* gathered() override { return exchange_.output == nullptr ? &result_ : nullptr; }
  std::string describe() const override;

 private:
  // What a rank announces. The blocks of a part lie one after the other; in a stage they alternate
  // between two places, beside those of the other ranks' parts unless all are the same.
  struct Announcement {
    int64_t begin = 0;   // of its array, or stage, in its memory
    int64_t stride = 0;  // from one place in the stage to the other; 0: it is the array
    int64_t lane_bytes = 0;
    int64_t blocks_in = 0;  // of a stage, when announced
    int64_t bytes = 0;      // of a part that is the same for all others
    int64_t counters = -1;  // of rank 0
    int64_t parts = -1;     // where each rank's part is listed, if only it knows them
  };

  // That list in shared memory: its parts, by rank, and how many ranks have read theirs.
  class Parts {
   public:
    explicit Parts(std::byte* memory) : memory_(memory) {}
    static size_t bytes(int size) { return kHeadBytes + sizeof(Span) * static_cast<size_t>(size); }
    SharedCounters::Counter& read() const {
      return *reinterpret_cast<SharedCounters::Counter*>(memory_);
    }
    Span* begin() const { return reinterpret_cast<Span*>(memory_ + kHeadBytes); }

   private:
    static constexpr size_t kHeadBytes = 64;
    std::byte* memory_;
  };

  // Where a rank's part for this rank is.
  struct Source {
    const std::byte* first;
    size_t stride;
    size_t bytes;
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  uint64_t blocks(size_t bytes) const;
  size_t block_length(size_t bytes, uint64_t block) const;
  const Source& source(int rank) const { return sources_[static_cast<size_t>(rank)]; }
  const Span& part(int rank) const { return exchange_.parts[static_cast<size_t>(rank)]; }
  std::byte* at(int rank, int64_t offset) const;

  // Which lane of a place in `owner`'s stage holds the part of `to`.
  static size_t lane(int owner, int to) { return static_cast<size_t>(to > owner ? to - 1 : to); }
  void find_stage();
  void publish_parts();
  bool announce();
  Announcement announced_by(int rank) const;
  Source find_source(int rank, const Announcement& told) const;
  void begin();
  bool copy_in();
  Executor::Ticket copy_block_in(uint64_t block);
  bool take();
  bool take_from(int rank);
  bool reduce_next();
  bool is_there(int rank, uint64_t block);
  const std::byte* block_at(int rank, uint64_t block) const;
  void notify_taken();
  bool all_have_taken(uint64_t blocks);
  bool all_have_taken_their_parts();
  void leave();

  Executor& executor_;
  const std::string name_;
  const std::shared_ptr<Window> window_;
  const std::vector<int> ranks_;
  const int rank_;
  const Exchange exchange_;
  const size_t block_bytes_;  // the same on all ranks
  Announcement own_;
  std::optional<Bruck> announcements_;  // of all ranks, once this one's is ready
  bool has_met_ = false;
  std::vector<Source> sources_;  // by rank
  std::shared_ptr<std::byte> parts_;
  std::shared_ptr<std::byte> stage_;
  size_t stride_ = 0;
  size_t lane_bytes_ = 0;      // from one rank's part in a place of the stage to the next one's
  uint64_t stage_blocks_ = 0;  // that go through the stage,
  Operations copies_in_;       // of them, in order,
  uint64_t in_ = 0;            // of them that are in it
  std::shared_ptr<std::byte> counters_;  // on rank 0
  SharedCounters shared_;
  Gathered result_;
  std::byte* output_ = nullptr;
  bool streams_ = false;
  std::vector<size_t> begins_;                 // in the output, by source
  std::vector<uint64_t> taken_;                // blocks, by source
  Executor::Ticket taking_ = Executor::kDone;  // the last of these copies
  bool has_notified_taken_ = true;             // whether the others know `taken_`
  std::vector<uint64_t> there_;                // blocks available, by source, at least
  uint64_t all_have_taken_ = 0;                // blocks, at least
  int64_t moved_ = 0;
};

}  // namespace ringdl

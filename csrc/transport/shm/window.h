#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "transport/shm/heap.h"
#include "transport/shm/segment.h"
#include "transport/shm/store_trial.h"

namespace ringdl {

/// Memory of this rank that the other ranks of its host see, and theirs: each rank has one segment,
/// from which it allocates, and has mapped those of the ranks that it reaches. What lies there is
/// named by its owner and its offset.
///
/// Threads: any, but reach() comes before all other use.
class Window {
 public:
  /// Allocations begin at a multiple of this: a cache line, and the widest vector.
  static constexpr uint64_t kAlignment = 64;

  /// @param size  ranks of the transport
  /// @param bytes  how much may be allocated; a quarter is for stages
  /// @param reserves  pages are allocated before they are touched: where the system promises no
  /// more memory than it has, touching one that cannot be had ends the process
  /// @throws Error  the system refuses
  Window(int rank, int size, size_t bytes, bool reserves = commits_strictly());

  /// As much as the machine has memory, or, with very many ranks, as much as can be mapped.
  /// @throws Error  the process is limited to so little that it is of no use
  static size_t default_bytes(int local_ranks);

  /// Whether the system promises no more memory than it has (vm.overcommit_memory is 2).
  static bool commits_strictly();

  Segment::Address address() const { return own_->segment->address(); }

  /// Maps the memory of another rank; whether that was possible. This rank's own is a no-op.
  bool reach(int rank, const Segment::Address& address);
  bool reaches(int rank) const { return segments_[static_cast<size_t>(rank)] != nullptr; }

  /// Whether a rank that is reached is known to have no process any more.
  bool has_ended(int rank) const { return segments_[static_cast<size_t>(rank)]->is_orphaned(); }

  /// What lies at `offset` in the memory of a rank that is reached, as this process sees it.
  std::byte* at(int rank, uint64_t offset) const {
    return segments_[static_cast<size_t>(rank)]->data() + offset;
  }

  /// How what this rank writes for others to read soon is stored best.
  StoreTrial& store_trial() { return store_trial_; }

  /// Where `data` is in this rank's memory; nothing if it is elsewhere, or only partly there.
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const;

  /// Memory for an array of this rank, of any content; null if there is no more of it. It stays
  /// valid after the window has gone. What is freed of it goes back to the system, but for some
  /// megabytes that are kept for the next arrays of their sizes.
  std::shared_ptr<std::byte> allocate(size_t bytes);

  /// Memory that lives as long as a call: stages, and the counters that ranks meet by. Apart from
  /// arrays, so arrays leave room for it, and its pages stay for the next call up to a bound.
  /// @throws OutOfMemory
  std::shared_ptr<std::byte> allocate_stage(size_t bytes);

  /// Keeps what was allocated until a counter that other ranks count up has reached a value. The
  /// counter lies in that memory.
  void free_once(std::shared_ptr<std::byte> memory, const std::atomic<uint64_t>& counter,
                 uint64_t value);

 private:
  struct Kept {
    std::shared_ptr<std::byte> memory;
    const std::atomic<uint64_t>* counter;
    uint64_t value;
  };

  struct Piece {
    uint64_t begin;
    uint64_t bytes;
    uint64_t end() const { return begin + bytes; }
  };

  // Held by what is allocated, too.
  struct Own {
    std::shared_ptr<Segment> segment;
    const bool reserves;
    const uint64_t kept_end;
    std::mutex mutex;
    Heap arrays;
    Heap stages;  // filled from below; pages below kept_end stay when they are free
    std::deque<Piece>
        spare;  // arrays that were freed, for the next of their sizes; the oldest first
    uint64_t spare_bytes = 0;

    Own(std::shared_ptr<Segment> its_segment, bool reserves_pages);
    std::optional<uint64_t> take_array(size_t bytes);
    std::optional<uint64_t> take_stage(size_t bytes);
    void give_back(Piece piece);
    void discard(const std::vector<Piece>& pieces);
    bool is_stage(Piece piece) const { return piece.begin >= stages_begin(*segment); }
    static uint64_t stages_begin(const Segment& segment);
  };

  std::shared_ptr<std::byte> hold(std::optional<uint64_t> begin, size_t bytes) const;

  const std::shared_ptr<Own> own_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank; null: not reached
  StoreTrial store_trial_;
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;
};

}  // namespace ringdl

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
#include "transport/window.h"

namespace ringdl {

/// A window whose memory is a segment per rank, mapped by those that reach it.
///
/// reach() comes before all other use.
class SegmentWindow final : public Window {
 public:
  /// @param size  ranks of the transport
  /// @param bytes  how much may be allocated; a quarter is for stages
  /// @param reserves  pages are allocated before they are touched: where the system promises no
  /// more memory than it has, touching one that it cannot provide ends the process
  /// @throws Error  the system refuses
  SegmentWindow(int rank, int size, size_t bytes, bool reserves = commits_strictly());
  /// What others may still use (free_once()) reads there as before, for as long as they map it.
  ~SegmentWindow() override;

  /// As much as the machine has memory, or, with very many ranks, as much as can be mapped.
  /// @throws Error  the process is limited to too little memory
  static size_t default_bytes(int local_ranks);

  /// Whether the system promises no more memory than it has (vm.overcommit_memory is 2).
  static bool commits_strictly();

  Segment::Address address() const { return own_->segment->address(); }

  /// Maps the memory of another rank; whether that was possible. This rank's own is a no-op.
  bool reach(int rank, const Segment::Address& address);
  bool reaches(int rank) const override { return segments_[static_cast<size_t>(rank)] != nullptr; }
  bool has_ended(int rank) const override {
    return segments_[static_cast<size_t>(rank)]->is_orphaned();
  }
  std::byte* at(int rank, uint64_t offset) const override {
    return segments_[static_cast<size_t>(rank)]->data() + offset;
  }
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const override;

  /// Freed memory goes back to the system, except some megabytes that are kept for the next arrays
  /// of their sizes. Null in a child made by fork(): the memory is its parent's.
  std::shared_ptr<std::byte> allocate(size_t bytes) override;
  /// Pages stay for the next call, up to a bound.
  std::shared_ptr<std::byte> allocate_stage(size_t bytes) override;
  void free_once(std::shared_ptr<std::byte> memory, const std::atomic<uint64_t>& counter,
                 uint64_t value) override;

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

  // Allocations hold it, too.
  struct Own {
    std::shared_ptr<Segment> segment;
    const int64_t process;
    const bool reserves;
    const uint64_t kept_end;
    std::mutex mutex;
    std::atomic<bool> leaves_pages = false;  // what is given back stays as it is
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
  void free_kept();

  const std::shared_ptr<Own> own_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank; null: not reached
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;
};

}  // namespace ringdl

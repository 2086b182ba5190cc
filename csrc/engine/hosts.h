#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "collective/host_layout.h"
#include "collective/shared/slots.h"
#include "engine/group.h"
#include "transport/window.h"

namespace ringdl {

/// Which ranks share memory, and through what.
class Hosts {
 public:
  /// Until use() each rank is on a host of its own.
  Hosts(int rank, int size);

  /// @param window  reaches the ranks of this one's host; may be null if there is no other
  /// @param hosts  the number of each rank's host; a rank that shares no memory is on one of its
  /// own. The same on all ranks
  void use(std::shared_ptr<Window> window, std::vector<int> hosts);

  /// Null if this rank shares no memory.
  const std::shared_ptr<Window>& window() const { return window_; }
  /// Where all ranks meet for small arrays; null unless all share memory.
  const std::shared_ptr<Slots>& slots() const { return slots_; }
  bool share_memory(const Group& group) const;
  /// The hosts of a group.
  const SharedLayout& layout_of(const Group& group);
  /// Memory that the ranks of this host see, if they share any and enough is left, else ordinary;
  /// of any content. Any thread.
  /// @throws OutOfMemory
  std::shared_ptr<std::byte> allocate(size_t bytes) const;

 private:
  const int rank_;
  const int size_;
  std::shared_ptr<Window> window_;
  std::vector<int> host_of_rank_;
  std::unordered_map<uint64_t, SharedLayout> layouts_;  // by group
  uint64_t last_group_ = 0;
  const SharedLayout* last_ = nullptr;  // what was asked for last: most often all ranks'
  std::shared_ptr<std::byte> slots_memory_;
  std::shared_ptr<Slots> slots_;
};

}  // namespace ringdl

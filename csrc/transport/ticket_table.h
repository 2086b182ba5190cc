#pragma once

#include <utility>
#include <vector>

#include "transport/transport.h"

namespace ringdl {

/// Hands out tickets: indices into a table that grows to the largest number of operations that were
/// ever in flight at once.
template <class Slot>
class TicketTable {
 public:
  Ticket add(Slot slot) {
    if (free_.empty()) {
      slots_.push_back(std::move(slot));
      return static_cast<Ticket>(slots_.size() - 1);
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    slots_[ticket] = std::move(slot);
    return ticket;
  }
  void remove(Ticket ticket) { free_.push_back(ticket); }
  Slot& operator[](Ticket ticket) { return slots_[ticket]; }

 private:
  std::vector<Slot> slots_;
  std::vector<Ticket> free_;
};

}  // namespace ringdl

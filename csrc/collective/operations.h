#pragma once

#include <cstdint>
#include <vector>

#include "reduce/executor.h"

namespace ringdl {

/// The operations that a collective has asked an executor for, in order. An immediate executor does
/// all at once, and nothing is kept.
class Operations {
 public:
  explicit Operations(Executor& executor) : executor_(executor) {}

  void add(Executor::Ticket ticket) {
    if (ticket == Executor::kDone && pending_.empty()) {
      ++done_;
    } else {
      pending_.push_back(ticket);
    }
  }

  /// How many were asked for.
  int64_t asked() const { return done_ + static_cast<int64_t>(pending_.size()); }

  /// How many are done, counted in order.
  int64_t done() {
    size_t ended = 0;
    while (ended < pending_.size() && executor_.is_done(pending_[ended])) ++ended;
    if (ended > 0) pending_.erase(pending_.begin(), pending_.begin() + static_cast<int64_t>(ended));
    return done_ += static_cast<int64_t>(ended);
  }

  bool all_done() { return done() == asked(); }

  /// Until all are done, or the device is lost, which then touches nothing any more.
  void await() {
    for (const Executor::Ticket ticket : pending_) ringdl::await(executor_, ticket);
  }

 private:
  Executor& executor_;
  int64_t done_ = 0;
  std::vector<Executor::Ticket> pending_;  // of those not done
};

}  // namespace ringdl

#include "collective/shared/slots.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringdl {

Slots::Slots(std::vector<std::byte*> memory, int rank)
    : memory_(std::move(memory)), rank_(rank), known_finished_(memory_.size(), 0) {}

void Slots::begin(uint64_t instance) {
  under_way_ = instance;
  update_finished();
}

bool Slots::can_put(uint64_t instance) {
  const uint64_t needed = instance < kSlots ? 0 : instance - kSlots + 1;
  for (int rank = 0; rank < size(); ++rank) {
    uint64_t& known = known_finished_[static_cast<size_t>(rank)];
    if (rank == rank_ || known >= needed) continue;
    known = std::max(known, finished(rank).load(std::memory_order_acquire));
    if (known < needed) return false;
  }
  return true;
}

void Slots::put(uint64_t instance, uint64_t digest, const std::byte* data, size_t bytes) {
  Head& slot = head(rank_, instance);
  std::memcpy(reinterpret_cast<std::byte*>(&slot) + kLineBytes, data, bytes);
  slot.digest = digest;
  slot.sequence.store(instance + 1, std::memory_order_release);
  reached_ = instance + 1;
}

void Slots::pass(uint64_t instance) {
  reached_ = instance + 1;
  passed(rank_).store(reached_, std::memory_order_release);
  update_finished();
}

// Whoever has gone further without an array in the slot has passed: had it put one, the slot would
// still hold it, as this rank has not finished.
Slots::State Slots::state_of(int rank, uint64_t instance) {
  const Head& slot = head(rank, instance);
  if (slot.sequence.load(std::memory_order_acquire) != instance + 1) {
    if (passed(rank).load(std::memory_order_acquire) <= instance) return State::kNotYet;
    if (slot.sequence.load(std::memory_order_acquire) != instance + 1) return State::kPassed;
  }
  uint64_t& known = known_finished_[static_cast<size_t>(rank)];
  known = std::max(known, instance);
  return State::kPut;
}

uint64_t Slots::digest(int rank, uint64_t instance) const { return head(rank, instance).digest; }

const std::byte* Slots::payload(int rank, uint64_t instance) const {
  return reinterpret_cast<const std::byte*>(&head(rank, instance)) + kLineBytes;
}

void Slots::finish(uint64_t instance) {
  if (under_way_ != instance) return;
  under_way_.reset();
  update_finished();
}

void Slots::update_finished() {
  finished(rank_).store(under_way_.value_or(reached_), std::memory_order_release);
}

}  // namespace ringdl

#include "collective/shared/slot_allreduce.h"

#include <array>
#include <vector>

namespace ringdl {

Polled SlotExchange::step(std::span<const std::byte> own) {
  Slots& slots = *call_.slots;
  if (!has_put_) {
    if (slots.is_too_late(call_.instance)) {
      finish();
      return Polled::kElsewhere;
    }
    if (!slots.can_put(call_.instance)) return Polled::kAwaitsRanks;
    slots.put(call_.instance, call_.digest, own.data(), own.size());
    has_put_ = true;
  }
  for (; seen_ < slots.size(); ++seen_) {
    if (seen_ == rank_) continue;
    const Slots::State state = slots.state_of(seen_, call_.instance);
    if (state == Slots::State::kNotYet) return Polled::kAwaitsRanks;
    if (state == Slots::State::kPassed || slots.digest(seen_, call_.instance) != call_.digest) {
      finish();
      return Polled::kElsewhere;
    }
  }
  return Polled::kDone;
}

std::string SlotExchange::describe() const {
  int here = 0;
  for (int rank = 0; rank < call_.slots->size(); ++rank) here += static_cast<int>(has_put(rank));
  return "allreduce on one host: " + std::to_string(here) + " of " +
         std::to_string(call_.slots->size()) + " ranks have arrived";
}

Polled SmallAllreduce::step(int size) {
  const Polled met = exchange_.step({data_, bytes_});
  if (met != Polled::kDone) return met;
  constexpr int kFew = 8;
  std::array<const std::byte*, kFew> few;
  std::vector<const std::byte*> many(size > kFew ? static_cast<size_t>(size) : 0);
  const std::byte** const sources = many.empty() ? few.data() : many.data();
  for (int rank = 0; rank < size; ++rank) {
    sources[rank] = rank == rank_ ? data_ : exchange_.payload(rank);
  }
  reduce_many_({sources, static_cast<size_t>(size)}, {&data_, 1}, bytes_);
  exchange_.finish();
  return met;
}

bool SlotAllreduce::step(Channel& channel) {
  if (!other_) {
    const Polled met = small_.step(channel.size());
    if (met != Polled::kElsewhere) return met == Polled::kDone;
    other_ = make_other_();
  }
  return other_->step(channel);
}

}  // namespace ringdl

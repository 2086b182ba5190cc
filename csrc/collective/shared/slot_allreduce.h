#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "collective/shared/in_memory.h"
#include "collective/shared/slots.h"
#include "reduce/reduce_many.h"

namespace ringdl {

/// One call for which ranks meet in slots.
struct SlotCall {
  std::shared_ptr<Slots> slots;
  uint64_t instance;
  uint64_t digest;  // of all that the ranks have to agree on
};

/// What each rank puts into its slot and all others read.
class SlotExchange {
 public:
  SlotExchange(SlotCall call, int rank) : call_(std::move(call)), rank_(rank) {
    call_.slots->begin(call_.instance);
  }

  /// Puts `own`, the same in each step. kDone, once all ranks have put; kElsewhere, once one has
  /// passed, or puts something else: all come to the same.
  Polled step(std::span<const std::byte> own);

  /// Once done: what another rank has, until finish().
  const std::byte* payload(int rank) const { return call_.slots->payload(rank, call_.instance); }
  void finish() { call_.slots->finish(call_.instance); }
  bool has_put(int rank) const {
    return rank == rank_ ? has_put_
                         : call_.slots->state_of(rank, call_.instance) == Slots::State::kPut;
  }
  std::string describe() const;

 private:
  const SlotCall call_;
  const int rank_;
  bool has_put_ = false;
  int seen_ = 0;  // ranks 0 .. seen_-1 have put
};

/// Reduces a small array of the CPU's memory in slots: each rank reads those of all others and
/// reduces for itself, in rank order. No messages, and two cache lines' latency: so little that a
/// call through an executor would show.
class SmallAllreduce {
 public:
  SmallAllreduce(SlotCall call, std::byte* data, size_t bytes, ReduceMany reduce_many, int rank)
      : exchange_(std::move(call), rank),
        data_(data),
        bytes_(bytes),
        reduce_many_(reduce_many),
        rank_(rank) {}

  /// As of the exchange; once all have put, the array holds the result.
  Polled step(int size);

  void finish() { exchange_.finish(); }
  bool has_put(int rank) const { return exchange_.has_put(rank); }
  std::string describe() const { return exchange_.describe(); }

 private:
  SlotExchange exchange_;
  std::byte* const data_;
  const size_t bytes_;
  const ReduceMany reduce_many_;
  const int rank_;
};

/// The same as a collective; where slots are not possible, by another one, which also finds what
/// ranks disagree on.
class SlotAllreduce final : public Collective {
 public:
  using MakeOther = std::function<std::unique_ptr<Collective>()>;

  SlotAllreduce(const SmallAllreduce& small, MakeOther make_other)
      : small_(small), make_other_(std::move(make_other)) {}
  ~SlotAllreduce() override { small_.finish(); }

  bool step(Channel& channel) override;
  int64_t pieces() const override { return other_ ? other_->pieces() : 0; }
  bool has_met(int rank) const override {
    return other_ ? other_->has_met(rank) : small_.has_put(rank);
  }
  std::string describe() const override { return other_ ? other_->describe() : small_.describe(); }

 private:
  SmallAllreduce small_;
  const MakeOther make_other_;
  std::unique_ptr<Collective> other_;
};

}  // namespace ringdl

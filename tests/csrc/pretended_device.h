#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "reduce/executor.h"

namespace ringdl::check {

/// An executor that carries nothing out before it is polled, or asked to: as a device does, in
/// ordinary memory. Reading what an operation writes too early, or writing what it reads, gives
/// other bits.
class PretendedDevice final : public Executor {
 public:
  explicit PretendedDevice(uint64_t seed) : random_(seed) {}

  bool is_idle() const { return asked_.empty(); }
  void carry_out_next() {
    asked_.front()();
    asked_.pop_front();
    ++done_;
  }

  Ticket last() const override { return last_; }

  Ticket copy(std::byte* into, const std::byte* from, size_t bytes, bool) override {
    return ask([=] { cpu_executor().copy(into, from, bytes); });
  }
  Ticket zero(std::byte* into, size_t bytes) override {
    return ask([=] { cpu_executor().zero(into, bytes); });
  }
  Ticket combine(const Reducer& reducer, std::byte* into, const std::byte* from,
                 size_t bytes) override {
    return ask([=] { reducer.combine(into, from, bytes); });
  }
  Ticket finish(const Reducer& reducer, std::byte* into, const std::byte* from,
                size_t bytes) override {
    return ask([=] { reducer.finish(into, from, bytes); });
  }
  Ticket reduce(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                std::span<std::byte* const> targets, size_t bytes, bool) override {
    return ask(
        [=, from = std::vector(sources.begin(), sources.end()),
         into = std::vector(targets.begin(), targets.end())] { reduce_many(from, into, bytes); });
  }
  Ticket pack(const Codec& codec, std::byte* wire, const std::byte* array, size_t bytes) override {
    return ask([=] { codec.pack(wire, array, bytes); });
  }
  Ticket unpack(const Codec& codec, std::byte* array, const std::byte* wire,
                size_t bytes) override {
    return ask([=] { codec.unpack(array, wire, bytes); });
  }

 protected:
  // It makes progress every other time.
  bool poll(Ticket ticket) override {
    if (done_ < ticket && polls_itself && random_() % 2 == 0) carry_out_next();
    return done_ >= ticket;
  }

 public:
  bool polls_itself = true;  // else only carry_out_next() does anything

 private:
  Ticket ask(std::function<void()> operation) {
    asked_.push_back(std::move(operation));
    return ++last_;
  }

  std::mt19937_64 random_;
  std::deque<std::function<void()>> asked_;
  Ticket last_ = 0;
  Ticket done_ = 0;
};

}  // namespace ringdl::check

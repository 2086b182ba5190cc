#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/executor.h"
#include "transport/simulated/network.h"

namespace ringdl {

/// How fast a rank's processor goes through memory.
struct SimulatedProcessor {
  double copy_bytes_per_second = 8e9;
  double reduce_bytes_per_second = 6e9;  // of one array that is added to another
  /// Without, nothing is computed: what it would have taken is all that happens.
  bool computes = true;
};

/// A rank's processor in a simulation: what it does takes time, in which the rank sends nothing.
class SimulatedExecutor final : public Executor {
 public:
  SimulatedExecutor(SimulatedNetwork& network, int rank, const SimulatedProcessor& processor)
      : network_(network), rank_(rank), its_(processor) {}

  bool is_immediate() const override { return true; }
  /// One piece at a time: ranks that do the same at the same time take turns to claim them.
  Grain grain() const override {
    Grain grain = cpu_executor().grain();
    grain.most_pieces = 1;
    return grain;
  }
  Ticket copy(std::byte* into, const std::byte* from, size_t bytes, bool streams) override;
  Ticket zero(std::byte* into, size_t bytes) override;
  Ticket combine(const Reducer& reducer, std::byte* into, const std::byte* from,
                 size_t bytes) override;
  Ticket finish(const Reducer& reducer, std::byte* into, const std::byte* from,
                size_t bytes) override;
  Ticket reduce(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                std::span<std::byte* const> targets, size_t bytes, bool streams) override;
  Ticket pack(const Codec& codec, std::byte* wire, const std::byte* array, size_t bytes) override;
  Ticket unpack(const Codec& codec, std::byte* array, const std::byte* wire, size_t bytes) override;

 protected:
  bool poll(Ticket) override { return true; }

 private:
  Ticket spend(size_t bytes, double bytes_per_second);

  SimulatedNetwork& network_;
  const int rank_;
  const SimulatedProcessor its_;
};

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "simulation/executor.h"
#include "transport/simulated/network.h"

namespace ringdl {

/// The engines of all ranks of a cluster, in one thread and under a virtual clock: the same engines
/// that jobs run, over a simulated network.
///
/// An engine is polled when something of it has ended, and at intervals, in which it looks whether
/// something is wrong. From the same options and calls all happens in the same order.
class Simulation {
 public:
  /// @param options  of the engines; their executors are its own
  /// @param shared_bytes  of each rank, for the ranks of its host to see; 0: they share no memory
  explicit Simulation(SimulatedNetworkOptions network, const SimulatedProcessor& processor = {},
                      EngineOptions options = {}, size_t shared_bytes = 0);
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  int size() const { return network_.size(); }
  Engine& operator[](int rank) { return *engines_[static_cast<size_t>(rank)]; }
  SimulatedNetwork& network() { return network_; }
  int64_t now_ns() const { return network_.clock().now_ns(); }
  /// When a rank has done what it does now.
  int64_t free_ns(int rank) const;

  /// See Driver::submit(); the arrays outlive this.
  std::shared_ptr<Work> submit(int rank, const Call& call, void* data);
  /// Something else was called on an engine: it is polled, and whoever sees what it has written.
  void wake(int rank);
  /// Lets time pass until `done`, which is asked after each event.
  /// @returns whether it was done within `time_ns`
  bool run_until(const std::function<bool()>& done, int64_t time_ns);
  /// Lets time pass until these works have ended.
  bool finish(const std::vector<std::shared_ptr<Work>>& works, int64_t time_ns);
  /// All ranks that are alive leave; until none has anything to send.
  bool leave(int64_t time_ns);

  /// What the engines would have printed.
  const std::string& said() const { return said_; }

 private:
  void share_memory(size_t bytes, std::span<const std::byte> phantom);
  void wake_once_free(int rank, int64_t time_ns);
  void wake_neighbours(int rank);
  void poll(int rank);
  void look_now_and_then(int rank);

  SimulatedNetwork network_;
  const bool has_jitter_;
  std::minstd_rand random_;
  const std::vector<int> hosts_;
  std::vector<std::vector<int>> neighbours_;  // by rank: those that share memory with it
  std::vector<int64_t> put_off_ns_;           // by rank: until then, as its processor is busy
  std::vector<int64_t> looks_ns_;             // by rank: when it looks whether something is wrong
  std::vector<std::unique_ptr<SimulatedExecutor>> executors_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::string said_;
};

}  // namespace ringdl

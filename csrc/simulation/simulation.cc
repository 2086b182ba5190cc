#include "simulation/simulation.h"

#include <algorithm>

namespace ringdl {
namespace {

// How often an engine is asked whether something is wrong. Its own intervals are longer.
constexpr int64_t kLookNs = 10 * kMillisecond;

}  // namespace

Simulation::Simulation(SimulatedNetworkOptions network, const SimulatedProcessor& processor,
                       EngineOptions options)
    : network_(std::move(network)) {
  for (int rank = 0; rank < network_.size(); ++rank) {
    executors_.push_back(std::make_unique<SimulatedExecutor>(network_, rank, processor));
    options.executor = executors_.back().get();
    engines_.push_back(
        std::make_unique<Engine>(network_.transport(rank), options, network_.clock()));
    look_now_and_then(rank);
  }
}

void Simulation::look_now_and_then(int rank) {
  network_.call_at(now_ns() + kLookNs, [this, rank] {
    if (!network_.is_alive(rank)) return;
    network_.wake_at(rank, now_ns());
    look_now_and_then(rank);
  });
}

void Simulation::poll(int rank) {
  Engine& engine = (*this)[rank];
  while (engine.poll() > 0) {
  }
  said_ += engine.watch_over(now_ns());
  engine.find_failed_ranks(now_ns());
}

bool Simulation::run_until(const std::function<bool()>& done, int64_t time_ns) {
  const int64_t end = now_ns() + time_ns;
  while (!done()) {
    for (auto awake = network_.take_awake(); !awake.empty(); awake = network_.take_awake()) {
      for (const int rank : awake) poll(rank);
    }
    if (done()) break;
    if (now_ns() >= end || !network_.advance()) return false;
  }
  return true;
}

bool Simulation::finish(const std::vector<std::shared_ptr<Work>>& works, int64_t time_ns) {
  size_t ended = 0;  // of the first ones
  return run_until(
      [&] {
        while (ended < works.size() && works[ended]->ended()) ++ended;
        return ended == works.size();
      },
      time_ns);
}

bool Simulation::leave(int64_t time_ns) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size(); ++rank) {
    if (network_.is_alive(rank)) ranks.push_back(rank);
  }
  for (const int rank : ranks) {
    (*this)[rank].leave();
    network_.wake_at(rank, now_ns());
  }
  return run_until(
      [&] {
        while (!ranks.empty() && (*this)[ranks.back()].have_all_left()) ranks.pop_back();
        return ranks.empty();
      },
      time_ns);
}

}  // namespace ringdl

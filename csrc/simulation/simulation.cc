#include "simulation/simulation.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "transport/simulated/heap_window.h"

namespace ringdl {
namespace {

// How often an engine is asked whether something is wrong. Its own intervals are longer.
constexpr int64_t kLookNs = 10 * kMillisecond;
constexpr int64_t kLeastLookNs = kMillisecond;
// After how long ranks of a host see what one of them has written; with jitter, one in so many
// times up to so much later, as a process does that has no core.
constexpr int64_t kSeenNs = 200;
constexpr uint64_t kOneIn = 4;
constexpr uint64_t kLateNs = 300 * kMicrosecond;

}  // namespace

Simulation::Simulation(SimulatedNetworkOptions network, const SimulatedProcessor& processor,
                       EngineOptions options, size_t shared_bytes)
    : network_(network),
      has_jitter_(network.jitter_seed != 0),
      random_(network.jitter_seed),
      hosts_(std::move(network.hosts)),
      neighbours_(hosts_.size()),
      put_off_ns_(hosts_.size()),
      looks_ns_(hosts_.size()) {
  for (int rank = 0; rank < network_.size(); ++rank) {
    executors_.push_back(std::make_unique<SimulatedExecutor>(network_, rank, processor));
    options.executor = executors_.back().get();
    engines_.push_back(
        std::make_unique<Engine>(network_.transport(rank), options, network_.clock()));
    look_now_and_then(rank);
  }
  if (shared_bytes > 0) share_memory(shared_bytes, network.phantom);
}

void Simulation::share_memory(size_t bytes, std::span<const std::byte> phantom) {
  std::vector<std::vector<int>> ranks_of_hosts(static_cast<size_t>(network_.hosts()));
  for (int rank = 0; rank < size(); ++rank) {
    ranks_of_hosts[static_cast<size_t>(hosts_[static_cast<size_t>(rank)])].push_back(rank);
  }
  const auto has_ended = [this](int other) { return !network_.is_alive(other); };
  for (const std::vector<int>& ranks : ranks_of_hosts) {
    const auto memories = std::make_shared<HeapWindow::Memories>(static_cast<size_t>(size()));
    for (const int rank : ranks) {
      (*memories)[static_cast<size_t>(rank)] = std::make_shared<HeapWindow::Memory>(bytes);
    }
    for (const int rank : ranks) {
      auto& neighbours = neighbours_[static_cast<size_t>(rank)];
      std::ranges::copy_if(ranks, std::back_inserter(neighbours),
                           [rank](int other) { return other != rank; });
      (*this)[rank].parts().hosts.use(
          std::make_shared<HeapWindow>(rank, memories, has_ended, phantom), hosts_);
    }
  }
}

void Simulation::look_now_and_then(int rank) {
  network_.call_at(now_ns() + kLookNs, [this, rank] {
    if (!network_.is_alive(rank)) return;
    network_.wake_at(rank, now_ns());
    look_now_and_then(rank);
  });
}

// A rank that is busy then looks when it is free.
void Simulation::wake_once_free(int rank, int64_t time_ns) {
  const int64_t free_ns = network_.free_ns(rank);
  if (free_ns < time_ns) return network_.wake_at(rank, time_ns);
  int64_t& put_off_ns = put_off_ns_[static_cast<size_t>(rank)];
  if (put_off_ns != free_ns) network_.wake_at(rank, free_ns);
  put_off_ns = free_ns;
}

// A rank may have written what those that share memory with it wait for.
void Simulation::wake_neighbours(int rank) {
  for (const int other : neighbours_[static_cast<size_t>(rank)]) {
    const bool is_late = has_jitter_ && random_() % kOneIn == 0;
    const auto late_ns = static_cast<int64_t>(is_late ? random_() % kLateNs : 0);
    wake_once_free(other, free_ns(rank) + kSeenNs + late_ns);
  }
}

std::shared_ptr<Work> Simulation::submit(int rank, const Call& call, void* data) {
  auto work = (*this)[rank].submit(call, data);
  wake_neighbours(rank);
  return work;
}

void Simulation::wake(int rank) {
  network_.wake_at(rank, now_ns());
  wake_neighbours(rank);
}

int64_t Simulation::free_ns(int rank) const { return std::max(now_ns(), network_.free_ns(rank)); }

// What it computes in a poll takes time, after which it polls again, and others see what it wrote.
void Simulation::poll(int rank) {
  const auto number = static_cast<size_t>(rank);
  if (network_.free_ns(rank) > now_ns()) return wake_once_free(rank, now_ns());
  Engine& engine = (*this)[rank];
  const uint64_t before = engine.moves();
  uint64_t moves = before;
  bool is_busy = false;
  do {
    moves = engine.moves();
    if (engine.poll() == 0) break;
    is_busy = network_.free_ns(rank) > now_ns();
  } while (!is_busy || network_.has_ended(rank));
  if (is_busy && engine.moves() > moves) wake_once_free(rank, now_ns());
  if (engine.moves() > before) wake_neighbours(rank);
  if (now_ns() < looks_ns_[number]) return;
  looks_ns_[number] = now_ns() + kLeastLookNs;
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
    wake(rank);
  }
  return run_until(
      [&] {
        while (!ranks.empty() && (*this)[ranks.back()].have_all_left()) ranks.pop_back();
        return ranks.empty();
      },
      time_ns);
}

}  // namespace ringdl

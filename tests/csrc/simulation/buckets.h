#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "simulation/activity.h"
#include "simulation/dice.h"

namespace ringdl::check {

/// All ranks launch a bucket of gradients, round after round; in memory that the ranks of a host
/// share where they do.
///
/// In round k, element i of rank r is r + k + i % 5.
class BucketActivity final : public Activity {
 public:
  BucketActivity(Dice& dice, Simulation& simulation, int number)
      : Activity(numbers_to(simulation.size())),
        number_(number),
        rounds_(static_cast<int>(dice(1, 4))),
        count_(static_cast<size_t>(dice.is_one_of(2) ? dice(1, 500) : dice(500, 60'000))),
        sides_(static_cast<size_t>(simulation.size())) {
    for (const int rank : members()) {
      side(rank).memory = simulation[rank].parts().hosts.allocate(bytes());
    }
    for (const int rank : members()) add(simulation[rank]);
  }

  int calls(int) const override { return rounds_; }

  bool call(Simulation& simulation, int rank) override {
    Side& its = side(rank);
    if (its.work && !its.work->ended()) return false;
    its.failure = failure_of(its);
    if (!its.failure.empty()) return true;
    its.is_wrong |= !is_right(rank);
    float* const gradients = reinterpret_cast<float*>(its.memory.get());
    for (size_t i = 0; i < count_; ++i) gradients[i] = value(rank, its.round, i);
    ++its.round;
    try {
      its.work = simulation[rank].launch_bucket(number_);
      simulation.wake(rank);
    } catch (const Error& error) {
      its.failure = error.what();
    }
    return true;
  }

  bool has_ended(int rank) const override {
    const Side& its = side(rank);
    return !its.failure.empty() || (its.round == rounds_ && its.work->ended());
  }

  std::string wrong(int rank, const std::vector<int>& victims) const override {
    const Side& its = side(rank);
    const std::string where = "bucket on rank " + std::to_string(rank);
    const std::string failure = failure_of(its);
    if (its.is_wrong || (failure.empty() && !is_right(rank))) return where + " has a wrong sum";
    if (failure.empty()) return "";
    const std::string wrong = wrong_failure(failure, victims);
    return wrong.empty() ? "" : where + wrong;
  }

 private:
  struct Side {
    std::shared_ptr<std::byte> memory;
    std::shared_ptr<std::byte> counters;  // of a host's first rank
    std::shared_ptr<Work> work;           // of the last round
    int round = 0;                        // rounds that have begun
    std::string failure;
    bool is_wrong = false;  // after a round before the last one
  };

  Side& side(int rank) { return sides_[static_cast<size_t>(rank)]; }
  const Side& side(int rank) const { return sides_[static_cast<size_t>(rank)]; }
  size_t bytes() const { return count_ * sizeof(float); }
  static float value(int rank, int round, size_t index) {
    return static_cast<float>(rank + round) + static_cast<float>(index % 5);
  }

  static std::string failure_of(const Side& side) {
    const bool has_failed = side.work && side.work->state == Work::State::kFailed;
    return has_failed && side.failure.empty() ? side.work->failure.text : side.failure;
  }

  // Whether the last round's sums are in the bucket; there may have been none.
  bool is_right(int rank) const {
    const Side& its = side(rank);
    if (!its.work) return true;
    const auto* const gradients = reinterpret_cast<const float*>(its.memory.get());
    for (size_t i = 0; i < count_; ++i) {
      float sum = 0;
      for (const int other : members()) sum += value(other, its.round - 1, i);
      if (gradients[i] != sum) return false;
    }
    return true;
  }

  void add(Engine& engine) {
    const Side& its = side(engine.rank());
    BucketSpec spec;
    spec.memory = its.memory;
    spec.data = its.memory.get();
    spec.bytes = bytes();
    spec.label = "bucket " + std::to_string(number_);
    spec.group = engine.parts().all;
    spec.shared = shared_by(engine);
    engine.parts().buckets.add(number_, std::move(spec));
  }

  // Each host's first rank has the counters.
  std::optional<SharedArrays> shared_by(Engine& engine) {
    Hosts& hosts = engine.parts().hosts;
    if (!hosts.window()) return std::nullopt;
    const SharedLayout layout = hosts.layout_of(*engine.parts().all);
    SharedArrays shared;
    for (const int rank : layout->local_ranks()) {
      shared.arrays.push_back(side(rank).memory.get());
    }
    Side& first = side(layout->local_ranks()[0]);
    const size_t length = SharedCounters::bytes(layout->local_size());
    if (!first.counters) {
      first.counters = hosts.allocate(length);
      std::fill_n(first.counters.get(), length, std::byte(0));
    }
    shared.counters = SharedCounters(first.counters.get(), layout->local_size());
    return shared;
  }

  const int number_;
  const int rounds_;
  const size_t count_;
  std::vector<Side> sides_;  // by rank
};

}  // namespace ringdl::check

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
    note_result(rank);
    if (!its.failure.empty()) return true;
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
    note_result(rank);
    const Side& its = side(rank);
    const std::string where = "bucket on rank " + std::to_string(rank);
    if (its.is_wrong) return where + " has a wrong sum";
    if (its.failure.empty()) return "";
    const std::string failure = wrong_failure(its.failure, victims);
    return failure.empty() ? "" : where + failure;
  }

 private:
  struct Side {
    std::shared_ptr<std::byte> memory;
    std::shared_ptr<std::byte> counters;  // of a host's first rank
    std::shared_ptr<Work> work;           // of the last round
    int round = 0;                        // rounds that have begun
    std::string failure;
    bool is_wrong = false;
  };

  Side& side(int rank) const { return sides_[static_cast<size_t>(rank)]; }
  size_t bytes() const { return count_ * sizeof(float); }
  static float value(int rank, int round, size_t index) {
    return static_cast<float>(rank + round) + static_cast<float>(index % 5);
  }

  // What a round has left in the bucket, before the next one overwrites it.
  void note_result(int rank) const {
    Side& its = side(rank);
    if (!its.work || !its.failure.empty()) return;
    if (its.work->state == Work::State::kFailed) {
      its.failure = its.work->failure.text;
      return;
    }
    const int size = static_cast<int>(members().size());
    const auto* const gradients = reinterpret_cast<const float*>(its.memory.get());
    for (size_t i = 0; i < count_; ++i) {
      float sum = 0;
      for (int other = 0; other < size; ++other) sum += value(other, its.round - 1, i);
      its.is_wrong |= gradients[i] != sum;
    }
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
  mutable std::vector<Side> sides_;  // by rank; results are noted late
};

}  // namespace ringdl::check

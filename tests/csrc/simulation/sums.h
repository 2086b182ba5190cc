#pragma once

#include <string>
#include <vector>

#include "simulation/activity.h"
#include "simulation/dice.h"

namespace ringdl::check {

/// Unnamed sums, most of them of a few numbers, by the ranks that have not joined. A rank waits for
/// some before it goes on, and not all ranks for the same ones.
class SumsActivity final : public Activity {
 public:
  SumsActivity(Dice& dice, int size, const std::vector<int>& live)
      : Activity(live),
        count_(static_cast<size_t>(dice(1, 40))),
        sides_(static_cast<size_t>(size)) {
    const int64_t awaited = dice(1, 4);
    for (size_t number = 0; number < count_; ++number) {
      const int64_t length = dice.is_one_of(4) ? dice(1, 30'000) : dice(1, 12);
      for (const int rank : live) {
        Side& its = side(rank);
        its.arrays.emplace_back(static_cast<size_t>(length), value(rank, number));
        its.are_awaited.push_back(dice(1, 4) <= awaited);
      }
    }
  }

  int calls(int rank) const override { return has(rank) ? static_cast<int>(count_) : 0; }
  bool is_ordered() const override { return true; }

  bool call(Simulation& simulation, int rank) override {
    Side& its = side(rank);
    const size_t number = its.works.size();
    if (number > 0 && its.are_awaited[number - 1] && !its.works.back()->ended()) return false;
    std::vector<float>& array = its.arrays[number];
    const auto length = static_cast<int64_t>(array.size());
    const Call sum{Kind::kAllreduce, DType::kFloat32, Reduction::kSum, -1, {length}, ""};
    its.works.push_back(its.are_awaited[number]
                            ? submit_awaited(simulation, rank, sum, array.data())
                            : simulation.submit(rank, sum, array.data()));
    return true;
  }

  bool has_ended(int rank) const override {
    const auto& works = sides_[static_cast<size_t>(rank)].works;
    return !has(rank) || (works.size() == count_ &&
                          std::ranges::all_of(works, [](auto& work) { return work->ended(); }));
  }

  std::string wrong(int rank, const std::vector<int>& victims) const override {
    const Side& its = sides_[static_cast<size_t>(rank)];
    for (size_t number = 0; number < its.works.size(); ++number) {
      const Work& work = *its.works[number];
      const std::string where = work.label() + " on rank " + std::to_string(rank);
      if (work.state == Work::State::kFailed) {
        const std::string failure = wrong_failure(work.failure.text, victims);
        if (!failure.empty()) return where + failure;
        continue;
      }
      float sum = 0;
      for (const int other : members()) sum += value(other, number);
      if (its.arrays[number] != std::vector<float>(its.arrays[number].size(), sum)) {
        return where + " has a wrong sum";
      }
    }
    return "";
  }

 private:
  struct Side {
    std::vector<std::vector<float>> arrays;
    std::vector<bool> are_awaited;
    std::vector<std::shared_ptr<Work>> works;
  };

  // As Driver::allreduce_now() does: in slots, where all ranks are on one host.
  static std::shared_ptr<Work> submit_awaited(Simulation& simulation, int rank, const Call& sum,
                                              float* data) {
    Immediate& immediate = simulation[rank].parts().immediate;
    const Key key = immediate.next_key(sum);
    simulation.wake(rank);
    switch (immediate.plan(sum, key).meeting) {
      case Meeting::kArraysInSlots:
        return immediate.submit(sum, key, data, immediate.begin_small(sum, key, data));
      case Meeting::kPlacesInSlots:
        return immediate.submit(sum, key, immediate.begin_direct(sum, key, data));
      default:
        return simulation.submit(rank, sum, data);
    }
  }

  Side& side(int rank) { return sides_[static_cast<size_t>(rank)]; }
  static float value(int rank, size_t number) {
    return static_cast<float>(rank + 1) * static_cast<float>(number + 1);
  }

  const size_t count_;
  std::vector<Side> sides_;  // by rank
};

}  // namespace ringdl::check

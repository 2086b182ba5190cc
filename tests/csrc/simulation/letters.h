#pragma once

#include <memory>
#include <string>
#include <vector>

#include "boxes.h"
#include "simulation/activity.h"
#include "simulation/dice.h"

namespace ringdl::check {

/// All ranks call one that has called nobody: it sums what each of them brings.
class LetterActivity final : public Activity {
 public:
  LetterActivity(Dice& dice, Simulation& simulation, int number)
      : Activity(numbers_to(simulation.size())),
        server_(static_cast<int>(dice(0, simulation.size() - 1))),
        count_(static_cast<size_t>(dice.is_one_of(2) ? dice(1, 50) : dice(50, 20'000))),
        calls_(static_cast<int>(dice(1, 3))),
        name_("letters " + std::to_string(number)),
        sides_(static_cast<size_t>(simulation.size()),
               {{}, std::vector<int64_t>(static_cast<size_t>(calls_), -1)}) {
    const auto box = std::make_shared<Sums>(count_, simulation.size());
    box->end_after(int64_t{calls_} * (simulation.size() - 1));
    Engine& engine = simulation[server_];
    engine.parts().mailbox.open({name_, engine.parts().all}, box);
  }

  int calls(int rank) const override { return rank == server_ ? 0 : calls_; }

  bool call(Simulation& simulation, int rank) override {
    Side& its = sides_[static_cast<size_t>(rank)];
    if (!its.works.empty() && !its.works.back()->ended()) return false;
    Engine& engine = simulation[rank];
    auto question = std::make_unique<Question>(std::vector<int64_t>(count_, rank + 1),
                                               its.sums[its.works.size()]);
    its.works.push_back(engine.call_box({name_, engine.parts().all}, server_, std::move(question)));
    simulation.wake(rank);
    return true;
  }

  bool has_ended(int rank) const override {
    const Side& its = sides_[static_cast<size_t>(rank)];
    return its.works.size() == static_cast<size_t>(calls(rank)) &&
           (its.works.empty() || its.works.back()->ended());
  }

  std::string wrong(int rank, const std::vector<int>& victims) const override {
    const Side& its = sides_[static_cast<size_t>(rank)];
    int64_t number = 0;
    for (const auto& work : its.works) {
      ++number;
      const std::string where = name_ + " from rank " + std::to_string(rank);
      if (work->state == Work::State::kFailed) {
        const std::string failure = wrong_failure(work->failure.text, victims);
        return failure.empty() ? "" : where + failure;
      }
      if (its.sums[static_cast<size_t>(number) - 1] !=
          number * static_cast<int64_t>(count_) * (rank + 1)) {
        return where + " has a wrong sum";
      }
    }
    return "";
  }

 private:
  struct Side {
    std::vector<std::shared_ptr<Work>> works;
    std::vector<int64_t> sums;  // what each call gets
  };

  const int server_;
  const size_t count_;
  const int calls_;
  const std::string name_;
  std::vector<Side> sides_;  // by rank
};

}  // namespace ringdl::check

// Whatever happens, from a seed: works of any kind, submitted in any order at any time, over links
// that are slow and are cut, or in memory that ranks share, by ranks that pause and die, or mean
// something else than the others. Each work ends everywhere: with the right result, or by the death
// of a rank that is named, or on all ranks as they disagree.
//
// RINGDL_TEST_SEEDS is how many runs there are, RINGDL_TEST_SEED a single one, which is told.

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "simulation/simulation.h"

using namespace ringdl;

namespace {

constexpr int64_t kSpan = 2 * kMillisecond;  // in which ranks submit
constexpr size_t kSharedBytes = 64 << 20;
constexpr int64_t kPatience = 30 * kSecond;

// Numbers from a seed.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t operator()(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine_);
  }
  bool is_one_of(int64_t count) { return (*this)(1, count) == 1; }

 private:
  std::mt19937_64 engine_;
};

// What all ranks are to do together, and their arrays. Element i of rank r begins as r + i % 5.
struct Task {
  Call call;
  std::vector<std::vector<float>> arrays;  // by rank
  std::vector<std::shared_ptr<Work>> works;
  int other_rank = -1;  // has an element more

  bool is_right(int rank) const {
    const auto size = static_cast<int64_t>(arrays.size());
    const auto& its = arrays[static_cast<size_t>(rank)];
    for (size_t i = 0; i < its.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      int64_t expected = 0;
      if (call.kind == Kind::kAllreduce) {
        expected = size * (size - 1) / 2 + size * (index % 5);
      } else if (call.kind == Kind::kBroadcast) {
        expected = call.root + index % 5;
      }
      if (its[i] != static_cast<float>(expected)) return false;
    }
    return true;
  }
};

Task make_task(Dice& dice, int size, int number) {
  Task task;
  const std::vector<int64_t> lengths{1, 7, dice(10, 2000), dice(2000, 60'000)};
  const int64_t count = lengths[static_cast<size_t>(dice(0, 3))];
  task.call.dtype = DType::kFloat32;
  task.call.name = "work " + std::to_string(number);
  switch (dice(0, 3)) {
    case 0:
      task.call.kind = Kind::kBroadcast;
      task.call.root = static_cast<int>(dice(0, size - 1));
      break;
    default:
      task.call.kind = Kind::kAllreduce;
      if (dice.is_one_of(3)) task.call.algorithm = Algorithm::kRing;
  }
  task.call.shape = {count};
  if (dice.is_one_of(10)) task.other_rank = static_cast<int>(dice(0, size - 1));
  for (int rank = 0; rank < size; ++rank) {
    std::vector<float> array(static_cast<size_t>(count + (rank == task.other_rank)));
    for (size_t i = 0; i < array.size(); ++i) {
      array[i] = static_cast<float>(rank) + static_cast<float>(i % 5);
    }
    task.arrays.push_back(std::move(array));
  }
  task.works.resize(static_cast<size_t>(size));
  return task;
}

SimulatedNetworkOptions make_network(Dice& dice, int size) {
  SimulatedNetworkOptions options;
  int host = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (rank > 0 && dice.is_one_of(2)) ++host;
    options.hosts.push_back(host);
  }
  options.link.bytes_per_second = static_cast<double>(dice(10, 2000)) * 1e6;
  options.link.latency_ns = dice(1, 100) * kMicrosecond;
  options.jitter_seed = static_cast<uint64_t>(dice(1, 1 << 30));
  options.eager_bytes = static_cast<size_t>(dice(0, 64 << 10));
  return options;
}

struct Run {
  explicit Run(uint64_t seed) : Run(seed, Dice(seed)) {}

  void submit_at(int64_t time_ns, Task& task, int rank) {
    network().call_at(time_ns, [this, &task, rank] {
      if (!network().is_alive(rank)) return;
      if (network().is_paused(rank)) {
        submit_at(simulation.now_ns() + kMillisecond, task, rank);
        return;
      }
      const auto index = static_cast<size_t>(rank);
      Call call = task.call;
      call.shape = {static_cast<int64_t>(task.arrays[index].size())};
      task.works[index] = simulation.submit(rank, call, task.arrays[index].data());
    });
  }

  bool have_ended() const {
    return std::ranges::all_of(tasks, [&](const Task& task) {
      for (const int rank : survivors) {
        const auto& work = task.works[static_cast<size_t>(rank)];
        if (!work || !work->ended()) return false;
      }
      return true;
    });
  }

  // What is wrong, in words; empty if nothing is.
  std::string carry_out() {
    if (!simulation.run_until([this] { return have_ended(); }, kPatience)) return "it hangs";
    for (const Task& task : tasks) {
      for (const int rank : survivors) {
        const Work& work = *task.works[static_cast<size_t>(rank)];
        const std::string where = task.call.name + " on rank " + std::to_string(rank);
        if (work.state == Work::State::kDone) {
          if (task.other_rank >= 0) return where + " ends well, though ranks disagree";
          if (!task.is_right(rank)) return where + " has a wrong result";
        } else if (work.failure.kind == FailureKind::kMismatch && task.other_rank >= 0) {
          continue;
        } else if (work.failure.kind != FailureKind::kRankFailed || !names_a_victim(work.failure)) {
          return where + " fails: " + work.failure.text;
        }
      }
    }
    if (victims.empty() && !simulation.leave(kPatience)) return "ranks cannot leave";
    return "";
  }

  bool names_a_victim(const Failure& failure) const {
    return std::ranges::any_of(victims, [&](int rank) {
      return failure.text.find("rank " + std::to_string(rank)) != std::string::npos;
    });
  }

  SimulatedNetwork& network() { return simulation.network(); }

  std::vector<Task> tasks;  // before what uses their arrays
  std::vector<int> victims;
  std::vector<int> survivors;
  Simulation simulation;

 private:
  Run(uint64_t seed, Dice dice)
      : simulation(make_network(dice, static_cast<int>(dice(2, seed % 50 == 0 ? 64 : 9))), {}, {},
                   seed % 2 == 0 ? kSharedBytes : 0) {
    const int size = simulation.size();
    const int count = static_cast<int>(dice(1, 8));
    for (int number = 0; number < count; ++number) tasks.push_back(make_task(dice, size, number));
    const int64_t begin = simulation.now_ns();
    for (int rank = 0; rank < size; ++rank) {
      for (Task& task : tasks) submit_at(begin + dice(0, kSpan), task, rank);
    }
    survivors.resize(static_cast<size_t>(size));
    std::iota(survivors.begin(), survivors.end(), 0);
    for (int faults = static_cast<int>(dice(0, 3)); faults > 0; --faults) {
      const int rank = static_cast<int>(dice(0, size - 1));
      const int host = static_cast<int>(dice(0, network().hosts() - 1));
      const int64_t time = begin + dice(0, 2 * kSpan);
      const int64_t later = time + dice(1, 500) * kMillisecond;
      switch (dice(0, 2)) {
        case 0:
          if (survivors.size() < 2 || std::ranges::count(victims, rank) > 0) break;
          victims.push_back(rank);
          std::erase(survivors, rank);
          network().call_at(time, [this, rank, notice = dice(0, 5 * kMillisecond)] {
            network().kill(rank, notice);
          });
          break;
        case 1:
          network().call_at(time, [this, rank] { network().pause(rank); });
          network().call_at(later, [this, rank] { network().resume(rank); });
          break;
        default:
          network().call_at(time, [this, host] { network().cut(host); });
          network().call_at(later, [this, host] { network().mend(host); });
      }
    }
  }
};

int number_in(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

}  // namespace

int main() {
  const int only = number_in("RINGDL_TEST_SEED", 0);
  const int first = only != 0 ? only : 1;
  const int last = only != 0 ? only : number_in("RINGDL_TEST_SEEDS", 300);
  for (int seed = first; seed <= last; ++seed) {
    std::string wrong;
    try {
      wrong = Run(static_cast<uint64_t>(seed)).carry_out();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    check::record(wrong.empty(), __FILE__, __LINE__,
                  "RINGDL_TEST_SEED=" + std::to_string(seed) + ": " + wrong);
  }
  return check::report();
}

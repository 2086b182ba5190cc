// Whatever happens, from a seed: collectives of any kind, buckets and calls in boxes, made in any
// order at any time, over links that are slow and are cut, or in memory that ranks share, by ranks
// that pause, die, run out of work, or mean something else than the others. Each call ends
// everywhere: with the right result, or by the death of a rank that is named, or on all ranks as
// they disagree.
//
// RINGDL_TEST_SEEDS is how many runs there are, RINGDL_TEST_SEED a single one, which is told.

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "simulation/activity.h"
#include "simulation/buckets.h"
#include "simulation/collectives.h"
#include "simulation/dice.h"
#include "simulation/letters.h"
#include "simulation/simulation.h"
#include "simulation/sums.h"

using namespace ringdl;
using check::Activity;
using check::Dice;

namespace {

constexpr int64_t kSpan = 2 * kMillisecond;  // in which ranks make their calls
constexpr int64_t kRetry = 100 * kMicrosecond;
constexpr size_t kSharedBytes = 256 << 20;
constexpr int64_t kPatience = 30 * kSecond;

SimulatedNetworkOptions make_network(Dice& dice, int size) {
  SimulatedNetworkOptions options;
  int host = 0;
  const bool is_one_host = dice.is_one_of(6);
  for (int rank = 0; rank < size; ++rank) {
    if (rank > 0 && !is_one_host && dice.is_one_of(2)) ++host;
    options.hosts.push_back(host);
  }
  options.link.bytes_per_second = static_cast<double>(dice(10, 2000)) * 1e6;
  options.link.latency_ns = dice(1, 100) * kMicrosecond;
  options.jitter_seed = static_cast<uint64_t>(dice(1, 1 << 30));
  options.eager_bytes = static_cast<size_t>(dice(0, 64 << 10));
  return options;
}

class Run {
 public:
  explicit Run(uint64_t seed) : Run(seed, Dice(seed)) {}

  // What is wrong, in words; empty if nothing is.
  std::string carry_out() {
    if (!simulation_.run_until([this] { return have_ended(); }, kPatience)) {
      return "it hangs\n" + what_is_in_flight();
    }
    for (const auto& activity : activities_) {
      for (const int rank : survivors_) {
        const std::string wrong = activity->wrong(rank, victims_);
        if (!wrong.empty()) return wrong;
      }
    }
    for (const auto& session : sessions_) {
      if (session && session->meeting->failure) return session->meeting->failure.text;
    }
    if (victims_.empty() && !simulation_.leave(kPatience)) return "ranks cannot leave";
    return "";
  }

 private:
  Run(uint64_t seed, Dice dice)
      : simulation_(make_network(dice, static_cast<int>(dice(2, seed % 50 == 0 ? 64 : 9))), {}, {},
                    seed % 2 == 0 ? kSharedBytes : 0),
        survivors_(check::numbers_to(simulation_.size())),
        sessions_(survivors_.size()) {
    begin_ns_ = simulation_.now_ns();
    joins_ = dice.is_one_of(4);
    make_activities(dice);
    for (const int rank : survivors_) make_calls(dice, rank);
    for (const int rank : survivors_) make_naps(dice, rank);
    if (!joins_) make_faults(dice);
  }

  void make_activities(Dice& dice) {
    const int size = simulation_.size();
    const auto count = static_cast<int>(dice(1, 8));
    std::vector<int> live = survivors_;
    for (int number = 0; number < count; ++number) {
      if (joins_ && live.size() > 1 && dice.is_one_of(2)) {
        live = dice.some_of(live, static_cast<size_t>(dice(1, static_cast<int64_t>(live.size()))));
      }
      if (dice.is_one_of(5)) {
        activities_.push_back(std::make_unique<check::SumsActivity>(dice, size, live));
      } else if (!joins_ && dice.is_one_of(8)) {
        activities_.push_back(std::make_unique<check::LetterActivity>(dice, simulation_, number));
      } else if (!joins_ && dice.is_one_of(6)) {
        activities_.push_back(std::make_unique<check::BucketActivity>(dice, simulation_, number));
      } else {
        activities_.push_back(
            std::make_unique<check::CollectiveActivity>(dice, size, number, live));
      }
    }
  }

  // In any order; but unnamed ones, and all of those that join, in one that ranks have in common.
  void make_calls(Dice& dice, int rank) {
    std::vector<Activity*> ordered;
    std::vector<Activity*> others;
    for (const auto& activity : activities_) {
      for (int call = 0; call < activity->calls(rank); ++call) {
        (joins_ || activity->is_ordered() ? ordered : others).push_back(activity.get());
      }
    }
    std::deque<Activity*> calls(ordered.begin(), ordered.end());
    for (Activity* const other : others) {
      calls.insert(calls.begin() + dice(0, static_cast<int64_t>(calls.size())), other);
    }
    std::vector<int64_t> times;
    for (size_t i = 0; i <= calls.size(); ++i) times.push_back(begin_ns_ + dice(0, kSpan));
    std::ranges::sort(times);
    calls_.push_back(std::move(calls));
    for (const int64_t time : times) call_at(time, rank);
  }

  // The next one of a rank's calls; after the last one it joins, if they do.
  void call_at(int64_t time_ns, int rank) {
    network().call_at(time_ns, [this, rank] {
      if (!network().is_alive(rank)) return;
      auto& calls = calls_[static_cast<size_t>(rank)];
      if (network().is_paused(rank)) {
        call_at(simulation_.now_ns() + kRetry, rank);
      } else if (!calls.empty()) {
        Activity* const next = calls.front();
        calls.pop_front();
        if (next->call(simulation_, rank)) return;
        if (next->is_ordered())
          calls.push_front(next);
        else
          calls.push_back(next);  // so that nothing waits for it
        call_at(simulation_.now_ns() + kRetry, rank);
      } else if (joins_) {
        sessions_[static_cast<size_t>(rank)] = simulation_[rank].parts().joining.begin();
        simulation_.wake(rank);
      }
    });
  }

  // A rank that has no core for a while, now and then.
  void make_naps(Dice& dice, int rank) {
    for (int64_t naps = dice(0, 8); naps > 0; --naps) {
      pause(rank, begin_ns_ + dice(0, kSpan), dice(10, 500) * kMicrosecond);
    }
  }

  void pause(int rank, int64_t time_ns, int64_t duration_ns) {
    network().call_at(time_ns, [this, rank] { network().pause(rank); });
    network().call_at(time_ns + duration_ns, [this, rank] { network().resume(rank); });
  }

  void make_faults(Dice& dice) {
    const int size = simulation_.size();
    for (int faults = static_cast<int>(dice(0, 3)); faults > 0; --faults) {
      const int rank = static_cast<int>(dice(0, size - 1));
      const int host = static_cast<int>(dice(0, network().hosts() - 1));
      const int64_t time = begin_ns_ + dice(0, 2 * kSpan);
      const int64_t later = time + dice(1, 500) * kMillisecond;
      switch (dice(0, 2)) {
        case 0:
          if (survivors_.size() < 2 || std::ranges::count(victims_, rank) > 0) break;
          victims_.push_back(rank);
          std::erase(survivors_, rank);
          network().call_at(time, [this, rank, notice = dice(0, 5 * kMillisecond)] {
            network().kill(rank, notice);
          });
          break;
        case 1:
          pause(rank, time, later - time);
          break;
        default:
          network().call_at(time, [this, host] { network().cut(host); });
          network().call_at(later, [this, host] { network().mend(host); });
      }
    }
  }

  bool have_ended() {
    for (const auto& activity : activities_) {
      for (const int rank : survivors_) {
        if (!activity->has_ended(rank)) return false;
      }
    }
    if (!joins_) return true;
    int64_t joined = 0;  // each is asked: a rank that has joined goes on by that
    for (const int rank : survivors_) joined += has_joined(rank);
    return joined == simulation_.size();
  }

  bool has_joined(int rank) {
    const auto& session = sessions_[static_cast<size_t>(rank)];
    if (!session) return false;
    JoinSession& joining = simulation_[rank].parts().joining;
    if (!joining.is_joined()) return true;
    if (!joining.is_over(*session)) return false;
    simulation_[rank].end_join(session);
    return true;
  }

  std::string what_is_in_flight() {
    std::string text;
    for (const int rank : survivors_) text += simulation_[rank].dump();
    return text;
  }

  SimulatedNetwork& network() { return simulation_.network(); }

  std::vector<std::unique_ptr<Activity>> activities_;  // before what uses their arrays
  Simulation simulation_;
  std::vector<int> survivors_;
  std::vector<int> victims_;
  std::vector<std::shared_ptr<JoinSession::Session>> sessions_;  // by rank
  std::vector<std::deque<Activity*>> calls_;                     // by rank: that are to be made
  int64_t begin_ns_ = 0;
  bool joins_ = false;
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
  int most_failures = 5;
  for (int seed = first; seed <= last && most_failures > 0; ++seed) {
    std::string wrong;
    try {
      wrong = Run(static_cast<uint64_t>(seed)).carry_out();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    most_failures -= !wrong.empty();
    check::record(wrong.empty(), __FILE__, __LINE__,
                  "RINGDL_TEST_SEED=" + std::to_string(seed) + ": " + wrong);
  }
  return check::report();
}

// Engines over a simulated network: sums and times, the same from the same seed, with faults.

#include "simulation/simulation.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "simulation/dice.h"
#include "simulation/phantom.h"
#include "simulation/predict.h"

using namespace ringdl;

namespace {

constexpr double kRate = 125e6;
constexpr int64_t kLatency = 20 * kMicrosecond;

SimulatedNetworkOptions links(std::vector<int> hosts, uint64_t jitter_seed = 0) {
  SimulatedNetworkOptions options;
  options.hosts = std::move(hosts);
  options.link = {kRate, kLatency};
  options.jitter_seed = jitter_seed;
  return options;
}

Call allreduce(size_t count, std::optional<Algorithm> algorithm = std::nullopt) {
  Call call{
      Kind::kAllreduce, DType::kFloat32, Reduction::kSum, -1, {static_cast<int64_t>(count)}, ""};
  call.algorithm = algorithm;
  return call;
}

// Element i of rank r is r + i % 7, so sums are exact.
struct Arrays {
  Arrays(int size, size_t count) : of_rank(static_cast<size_t>(size), std::vector<float>(count)) {
    for (size_t rank = 0; rank < of_rank.size(); ++rank) {
      for (size_t i = 0; i < count; ++i) of_rank[rank][i] = static_cast<float>(rank + i % 7);
    }
  }
  bool is_sum(int rank) const {
    const auto size = of_rank.size();
    const auto& its = of_rank[static_cast<size_t>(rank)];
    for (size_t i = 0; i < its.size(); ++i) {
      if (its[i] != static_cast<float>(size * (size - 1) / 2 + size * (i % 7))) return false;
    }
    return true;
  }

  std::vector<std::vector<float>> of_rank;
};

std::vector<std::shared_ptr<Work>> submit(Simulation& simulation, Arrays& arrays,
                                          const Call& call) {
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < simulation.size(); ++rank) {
    works.push_back(
        simulation.submit(rank, call, arrays.of_rank[static_cast<size_t>(rank)].data()));
  }
  return works;
}

bool is_well(const Work& work) { return work.state == Work::State::kDone; }

// How long an allreduce takes.
int64_t time_of(Simulation& simulation, size_t count, const Call& call) {
  Arrays arrays(simulation.size(), count);
  const int64_t begin = simulation.now_ns();
  const auto works = submit(simulation, arrays, call);
  CHECK(simulation.finish(works, 1000 * kSecond));
  for (int rank = 0; rank < simulation.size(); ++rank) {
    CHECK(is_well(*works[static_cast<size_t>(rank)]) && arrays.is_sum(rank));
  }
  return simulation.now_ns() - begin;
}

void test_sums() {
  for (int size = 1; size <= 8; ++size) {
    for (const size_t count : {size_t{1}, size_t{37}, size_t{100'003}}) {
      for (const auto& hosts :
           {check::numbers_to(size), std::vector<int>(static_cast<size_t>(size), 0)}) {
        Simulation simulation(links(hosts));
        time_of(simulation, count, allreduce(count));
        time_of(simulation, count, allreduce(count, Algorithm::kRing));
        time_of(simulation, count, allreduce(count, Algorithm::kDoubling));
        CHECK(simulation.leave(kSecond));
      }
    }
  }
}

// A ring takes 2 (P - 1) / P of the bytes over each link, and as many latencies as steps.
void test_time_of_a_ring() {
  constexpr size_t kCount = 4 << 20;
  for (const int size : {2, 4, 16}) {
    Simulation simulation(links(check::numbers_to(size)));
    const int64_t time = time_of(simulation, kCount, allreduce(kCount, Algorithm::kRing));
    const double share = 2.0 * (size - 1) / size;
    const double bound = share * kCount * sizeof(float) / kRate * kSecond;
    const double ratio = static_cast<double>(time) / bound;
    check::record(ratio >= 1 && ratio < 1.1, __FILE__, __LINE__,
                  std::to_string(size) + " ranks: " + std::to_string(ratio) + " of the bound");
    CHECK(simulation.network().bytes_sent(0) >= static_cast<uint64_t>(share * kCount * 4));
    CHECK(simulation.network().bytes_sent(0) < static_cast<uint64_t>(1.01 * share * kCount * 4));
  }
}

// All that happens follows from the seed, and sums do not depend on it.
void test_seeds() {
  const auto time_from = [](uint64_t seed) {
    Simulation simulation(links({0, 0, 1, 1, 2}, seed));
    int64_t time = 0;
    for (const size_t count : {size_t{5}, size_t{3000}, size_t{300'000}}) {
      time += time_of(simulation, count, allreduce(count));
    }
    CHECK(simulation.leave(kSecond));
    return time;
  };
  std::vector<int64_t> times;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    times.push_back(time_from(seed));
    CHECK_EQ(time_from(seed), times.back());
  }
  std::ranges::sort(times);
  CHECK(std::ranges::unique(times).size() < 5);
}

// A rank that ends at any moment of an allreduce: the others hear of it, or have the sums.
void test_a_rank_that_is_killed() {
  constexpr int kSize = 5;
  constexpr size_t kCount = 50'000;
  constexpr int64_t kNotice = kMillisecond;
  int failed_runs = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Arrays arrays(kSize, kCount);
    Simulation simulation(links(check::numbers_to(kSize), seed));
    const auto works = submit(simulation, arrays, allreduce(kCount));
    const int victim = static_cast<int>(seed % kSize);
    simulation.network().call_at(simulation.now_ns() + static_cast<int64_t>(seed) * 20'000,
                                 [&] { simulation.network().kill(victim, kNotice); });
    std::vector<std::shared_ptr<Work>> left;
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank != victim) left.push_back(works[static_cast<size_t>(rank)]);
    }
    CHECK(simulation.finish(left, 5 * kSecond));
    int failed = 0;
    for (int rank = 0; rank < kSize; ++rank) {
      const Work& work = *works[static_cast<size_t>(rank)];
      if (rank == victim) continue;
      if (is_well(work)) {
        CHECK(arrays.is_sum(rank));
      } else {
        CHECK(work.failure.kind == FailureKind::kRankFailed);
        CHECK(work.failure.text.find("rank " + std::to_string(victim)) != std::string::npos);
        ++failed;
      }
    }
    failed_runs += failed > 0;
  }
  CHECK(failed_runs > 50 && failed_runs < 200);
}

// What a link that is cut has not carried comes once it is mended; a rank that is paused is late.
void test_links_that_are_cut_and_ranks_that_pause() {
  constexpr size_t kCount = 500'000;
  Simulation undisturbed(links(check::numbers_to(4)));
  const int64_t time = time_of(undisturbed, kCount, allreduce(kCount));
  for (const bool is_link : {true, false}) {
    Simulation simulation(links(check::numbers_to(4)));
    SimulatedNetwork& network = simulation.network();
    const int64_t begin = simulation.now_ns();
    network.call_at(begin + time / 2, [&] { is_link ? network.cut(2) : network.pause(2); });
    network.call_at(begin + time / 2 + kSecond,
                    [&] { is_link ? network.mend(2) : network.resume(2); });
    const int64_t took = time_of(simulation, kCount, allreduce(kCount));
    CHECK(took > kSecond && took < kSecond + 2 * time);
  }
  Simulation simulation(links(check::numbers_to(4)));
  simulation.network().slow(1, 3);
  CHECK(time_of(simulation, kCount, allreduce(kCount)) > 2 * time);
}

// Sizes alone: arrays that nobody has.
void test_phantom_arrays() {
  constexpr int kSize = 64;
  constexpr size_t kCount = 16 << 20;
  const PhantomMemory memory(kCount * sizeof(float));
  SimulatedNetworkOptions options = links(check::numbers_to(kSize));
  options.phantom = memory.bytes();
  SimulatedProcessor processor;
  processor.computes = false;
  Simulation simulation(options, processor);
  std::vector<std::shared_ptr<Work>> works;
  const int64_t begin = simulation.now_ns();
  for (int rank = 0; rank < kSize; ++rank) {
    works.push_back(simulation.submit(rank, allreduce(kCount, Algorithm::kRing), memory.data()));
  }
  CHECK(simulation.finish(works, 100 * kSecond));
  CHECK(std::ranges::all_of(works, [](const auto& work) { return is_well(*work); }));
  const double bound = 2.0 * (kSize - 1) / kSize * kCount * sizeof(float) / kRate * kSecond;
  const double ratio = static_cast<double>(simulation.now_ns() - begin) / bound;
  check::record(ratio >= 1 && ratio < 1.1, __FILE__, __LINE__, std::to_string(ratio));
  CHECK(simulation.leave(kSecond));
}

// So many hosts that lanes are grids, or, as 37 is a prime, a ring.
void test_many_hosts() {
  for (const int host_count : {36, 37}) {
    std::vector<int> hosts;
    for (int rank = 0; rank < 2 * host_count; ++rank) hosts.push_back(rank / 2);
    for (const uint64_t seed : {0u, 5u}) {
      Simulation simulation(links(hosts, seed), {}, {}, 64 << 20);
      for (const size_t count : {size_t{5}, size_t{40'007}}) {
        time_of(simulation, count, allreduce(count, Algorithm::kHierarchical));
      }
      CHECK(simulation.leave(kSecond));
    }
  }
}

// What is under way when a grid is given up is longer than a segment; other works go on.
void test_a_grid_that_is_given_up() {
  constexpr size_t kCount = 1 << 19;
  std::vector<int> hosts;
  for (int rank = 0; rank < 64; ++rank) hosts.push_back(rank / 2);
  EngineOptions options;
  options.segment_bytes = 32 << 10;
  for (const int64_t after : {2 * kMillisecond, 5 * kMillisecond, 10 * kMillisecond}) {
    Arrays arrays(64, kCount);
    Simulation simulation(links(hosts), {}, options, 64 << 20);
    const auto works = submit(simulation, arrays, allreduce(kCount, Algorithm::kHierarchical));
    simulation.network().call_at(simulation.now_ns() + after, [&] {
      simulation[0].give_up(*works[0], "a test");
      simulation.wake(0);
    });
    CHECK(simulation.finish(works, 10 * kSecond));
    CHECK(!is_well(*works[63]));
    time_of(simulation, 1000, allreduce(1000));
    CHECK(simulation.leave(10 * kSecond));
  }
}

// A step and the end: not every rank tells every other.
void test_messages_of_a_job() {
  for (const int size : {64, 512}) {
    std::vector<int> hosts;
    for (int rank = 0; rank < size; ++rank) hosts.push_back(rank / 8);
    Simulation simulation(links(hosts), {}, {}, 64 << 20);
    time_of(simulation, 100, allreduce(100));
    CHECK(simulation.leave(kSecond));
    const double all = static_cast<double>(simulation.network().messages_sent());
    const double share = all / (size * std::log2(size));
    check::record(share < 4, __FILE__, __LINE__,
                  std::to_string(share) + " P log P messages of " + std::to_string(size));
  }
}

// Hosts of eight ranks, whose links are slower than their memory: the link is what it takes.
Prediction predict(const ImaginedCluster& cluster, size_t bytes,
                   std::optional<Algorithm> wanted = std::nullopt) {
  return predict_allreduces(cluster, std::vector<ReadyArray>{{bytes}}, wanted);
}

void test_what_is_predicted() {
  ImaginedCluster cluster;
  for (int rank = 0; rank < 64; ++rank) cluster.hosts.push_back(rank / 8);
  cluster.link = {kRate, kLatency};
  constexpr size_t kBytes = 64 << 20;
  const double share = 2.0 * 7 / 8;
  const double bound = share * kBytes / kRate;
  const Prediction chosen = predict(cluster, kBytes);
  CHECK(chosen.algorithms.front() == Algorithm::kHierarchical);
  const double ratio = chosen.seconds / bound;
  check::record(ratio >= 1 && ratio < 1.1, __FILE__, __LINE__, std::to_string(ratio));
  CHECK(static_cast<double>(chosen.most_link_bytes) < 1.02 * share * kBytes);
  cluster.shares_memory = false;
  const Prediction ring = predict(cluster, kBytes, Algorithm::kRing);
  CHECK(ring.seconds > chosen.seconds);
  CHECK_THROWS(predict(cluster, kBytes, Algorithm::kDirect), UsageError, "direct");
}

// In a ring of two each adds a half, which takes its time.
void test_processors_take_time() {
  constexpr size_t kBytes = 64 << 20;
  ImaginedCluster cluster;
  cluster.hosts = {0, 0};
  cluster.link = {kRate, kLatency};
  cluster.shares_memory = false;
  cluster.processor.reduce_bytes_per_second = 1e9;
  const double slow = predict(cluster, kBytes, Algorithm::kRing).seconds;
  cluster.processor.reduce_bytes_per_second = 1e12;
  const double fast = predict(cluster, kBytes, Algorithm::kRing).seconds;
  const double added = (slow - fast) / (0.5 * kBytes / 1e9);
  check::record(added > 0.7 && added <= 1.01, __FILE__, __LINE__, std::to_string(added));
}

}  // namespace

int main() {
  test_sums();
  test_time_of_a_ring();
  test_seeds();
  test_a_rank_that_is_killed();
  test_links_that_are_cut_and_ranks_that_pause();
  test_phantom_arrays();
  test_many_hosts();
  test_a_grid_that_is_given_up();
  test_messages_of_a_job();
  test_what_is_predicted();
  test_processors_take_time();
  return check::report();
}

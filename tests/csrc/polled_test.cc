// A thousand engines in one process: no threads, polled one after the other under the test's own
// clock. What each of them keeps is bounded.

#include <malloc.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "transport/loopback/loopback.h"

using namespace ringdl;

namespace {

constexpr int kRanks = 1000;
constexpr size_t kMostBytesPerRank = 256 << 10;

class TestClock final : public Clock {
 public:
  int64_t now_ns() const override { return now_ns_; }
  void advance(int64_t ns) { now_ns_ += ns; }

 private:
  int64_t now_ns_ = kSecond;
};

size_t allocated_bytes() { return mallinfo2().uordblks + mallinfo2().hblkhd; }

class Cluster {
 public:
  Cluster() {
    for (auto& transport : make_loopback(kRanks)) {
      engines_.push_back(std::make_unique<Engine>(std::move(transport), EngineOptions{}, clock_));
    }
  }

  TestClock& clock() { return clock_; }
  Engine& operator[](int rank) { return *engines_[static_cast<size_t>(rank)]; }

  void for_each(const std::function<void(Engine&)>& act) {
    for (const auto& engine : engines_) act(*engine);
  }

  /// Polls all until `done`; a microsecond of the clock passes at each round.
  /// @returns whether it came to that before a second was over
  bool poll_until(const std::function<bool()>& done) {
    const int64_t end = clock_.now_ns() + kSecond;
    while (!done() && clock_.now_ns() < end) {
      clock_.advance(kMicrosecond);
      for_each([this](Engine& engine) {
        engine.poll();
        engine.watch_over(clock_.now_ns());
      });
    }
    return done();
  }

  bool finish(const std::vector<std::shared_ptr<Work>>& works) {
    return poll_until(
        [&] { return std::ranges::all_of(works, [](const auto& work) { return work->ended(); }); });
  }

 private:
  TestClock clock_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// Each element is the sum of what the ranks have: rank + element.
float sum_at(size_t element) {
  return static_cast<float>(kRanks) * static_cast<float>(kRanks - 1) / 2 +
         static_cast<float>(kRanks) * static_cast<float>(element);
}

std::vector<float> values_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(rank) + static_cast<float>(i);
  return values;
}

void check_sums(const std::vector<std::vector<float>>& arrays, size_t count) {
  bool is_right = true;
  for (const auto& array : arrays) {
    for (size_t i = 0; i < count; ++i) is_right &= array[i] == sum_at(i);
  }
  CHECK(is_right);
}

void allreduces(Cluster& cluster, size_t count, Algorithm algorithm) {
  std::vector<std::vector<float>> arrays;
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < kRanks; ++rank) arrays.push_back(values_of(rank, count));
  Call call{
      Kind::kAllreduce, DType::kFloat32, Reduction::kSum, -1, {static_cast<int64_t>(count)}, ""};
  call.algorithm = algorithm;
  for (int rank = 0; rank < kRanks; ++rank) {
    works.push_back(cluster[rank].submit(call, arrays[static_cast<size_t>(rank)].data()));
  }
  CHECK(cluster.finish(works));
  check_sums(arrays, count);
}

void buckets(Cluster& cluster, size_t count) {
  std::vector<std::vector<float>> arrays;
  for (int rank = 0; rank < kRanks; ++rank) {
    arrays.push_back(values_of(rank, count));
    auto& array = arrays.back();
    cluster[rank].buckets().add(
        0, {nullptr, array.data(), array.size() * sizeof(float), DType::kFloat32, Reduction::kSum,
            Codec(), "bucket", cluster[rank].all()});
  }
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<Work>> works;
    for (int rank = 0; rank < kRanks; ++rank) {
      std::ranges::copy(values_of(rank, count), arrays[static_cast<size_t>(rank)].begin());
      works.push_back(cluster[rank].launch_bucket(0));
    }
    CHECK(cluster.finish(works));
    check_sums(arrays, count);
  }
  cluster.for_each([](Engine& engine) { engine.remove_bucket(0); });
}

// Who is late is found out under the test's clock, too.
void leaving(Cluster& cluster) {
  cluster.for_each([](Engine& engine) { engine.leave(); });
  CHECK(cluster.poll_until([&] {
    bool is_over = true;
    cluster.for_each([&](Engine& engine) { is_over &= engine.have_all_left(); });
    return is_over;
  }));
}

}  // namespace

int main() {
  const size_t before = allocated_bytes();
  {
    Cluster cluster;
    allreduces(cluster, 3, Algorithm::kDoubling);
    allreduces(cluster, 2500, Algorithm::kRing);
    buckets(cluster, 2500);
    const size_t per_rank = (allocated_bytes() - before) / kRanks;
    check::record(per_rank <= kMostBytesPerRank, __FILE__, __LINE__,
                  std::to_string(per_rank) + " bytes per rank");
    leaving(cluster);
  }
  return check::report();
}

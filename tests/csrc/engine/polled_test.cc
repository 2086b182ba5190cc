// A thousand engines in one process: no threads, polled one after the other under the test's own
// clock. What each of them keeps is bounded. Then some that share memory.

#include <malloc.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "cluster.h"
#include "transport/simulated/heap_window.h"

using namespace ringdl;
using ringdl::check::Cluster;

namespace {

constexpr int kRanks = 1000;
constexpr size_t kMostBytesPerRank = 256 << 10;

size_t allocated_bytes() { return mallinfo2().uordblks + mallinfo2().hblkhd; }

// Each element is the sum of what the ranks have: rank + element.
float sum_at(size_t element, int size) {
  const auto ranks = static_cast<float>(size);
  return ranks * (ranks - 1) / 2 + ranks * static_cast<float>(element);
}

std::vector<float> values_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(rank) + static_cast<float>(i);
  return values;
}

void check_sums(const std::vector<float*>& arrays, size_t count) {
  bool is_right = true;
  for (const float* array : arrays) {
    for (size_t i = 0; i < count; ++i) {
      is_right &= array[i] == sum_at(i, static_cast<int>(arrays.size()));
    }
  }
  CHECK(is_right);
}

/// @param arrays  by rank, each of `count` elements
void allreduce(Cluster& cluster, const std::vector<float*>& arrays, size_t count,
               std::optional<Algorithm> algorithm = std::nullopt) {
  Call call{
      Kind::kAllreduce, DType::kFloat32, Reduction::kSum, -1, {static_cast<int64_t>(count)}, ""};
  call.algorithm = algorithm;
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    float* const array = arrays[static_cast<size_t>(rank)];
    std::ranges::copy(values_of(rank, count), array);
    works.push_back(cluster[rank].submit(call, array));
  }
  CHECK(cluster.finish(works));
  check_sums(arrays, count);
}

void allreduces(Cluster& cluster, size_t count, std::optional<Algorithm> algorithm = std::nullopt) {
  std::vector<std::vector<float>> memory(static_cast<size_t>(cluster.size()));
  std::vector<float*> arrays;
  for (auto& array : memory) {
    array.resize(count);
    arrays.push_back(array.data());
  }
  allreduce(cluster, arrays, count, algorithm);
}

void buckets(Cluster& cluster, size_t count) {
  std::vector<std::vector<float>> memory(static_cast<size_t>(cluster.size()));
  std::vector<float*> arrays;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    auto& array = memory[static_cast<size_t>(rank)];
    array.resize(count);
    arrays.push_back(array.data());
    cluster[rank].parts().buckets.add(
        0, {nullptr, array.data(), array.size() * sizeof(float), DType::kFloat32, Reduction::kSum,
            Codec(), "bucket", cluster[rank].parts().all});
  }
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<Work>> works;
    for (int rank = 0; rank < cluster.size(); ++rank) {
      std::ranges::copy(values_of(rank, count), arrays[static_cast<size_t>(rank)]);
      works.push_back(cluster[rank].launch_bucket(0));
    }
    CHECK(cluster.finish(works));
    check_sums(arrays, count);
  }
  cluster.for_each([](Engine& engine) { engine.remove_bucket(0); });
}

// Late ranks are found under the test's clock, too.
void leaving(Cluster& cluster) {
  cluster.for_each([](Engine& engine) { engine.leave(); });
  CHECK(cluster.poll_until([&] {
    bool is_over = true;
    cluster.for_each([&](Engine& engine) { is_over &= engine.have_all_left(); });
    return is_over;
  }));
}

// Arrays in memory that the ranks of a host share, and arrays that only their owners reach.
void share_memory(const std::vector<int>& hosts) {
  constexpr size_t kBytes = 8 << 20;
  constexpr size_t kCount = 30000;
  Cluster cluster(static_cast<int>(hosts.size()));
  std::vector<std::shared_ptr<HeapWindow::Memory>> memories;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    memories.push_back(std::make_shared<HeapWindow::Memory>(kBytes));
  }
  for (int rank = 0; rank < cluster.size(); ++rank) {
    HeapWindow::Memories reached = memories;
    for (size_t other = 0; other < hosts.size(); ++other) {
      if (hosts[other] != hosts[static_cast<size_t>(rank)]) reached[other] = nullptr;
    }
    cluster[rank].parts().hosts.use(std::make_shared<HeapWindow>(rank, std::move(reached)), hosts);
  }
  allreduces(cluster, 10);
  allreduces(cluster, kCount);
  {
    std::vector<std::shared_ptr<std::byte>> shared;
    std::vector<float*> arrays;
    cluster.for_each([&](Engine& engine) {
      shared.push_back(engine.parts().hosts.window()->allocate(kCount * sizeof(float)));
      arrays.push_back(reinterpret_cast<float*>(shared.back().get()));
    });
    allreduce(cluster, arrays, kCount);
  }
  leaving(cluster);
}

}  // namespace

int main() {
  const size_t before = allocated_bytes();
  {
    Cluster cluster(kRanks);
    allreduces(cluster, 3, Algorithm::kDoubling);
    allreduces(cluster, 2500, Algorithm::kRing);
    buckets(cluster, 2500);
    const size_t per_rank = (allocated_bytes() - before) / kRanks;
    check::record(per_rank <= kMostBytesPerRank, __FILE__, __LINE__,
                  std::to_string(per_rank) + " bytes per rank");
    leaving(cluster);
  }
  share_memory({0, 0, 0, 0, 0});
  share_memory({0, 0, 1, 1, 1, 2, 2, 3});
  return check::report();
}

// Each kind of call as the state machine that is made for it, for every way of placing some ranks
// on hosts: ranks are objects of one thread, and steps, messages and a device's operations happen
// in orders drawn from a seed.

#include "engine/make_collective.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/planner/algorithms.h"
#include "collective/planner/choice.h"
#include "network.h"
#include "transport/simulated/heap_window.h"

using namespace ringdl;
using ringdl::check::Network;
using Parts = std::vector<std::unique_ptr<Collective>>;

namespace {

constexpr size_t kWindowBytes = 16 << 20;
constexpr size_t kSegmentBytes = 4096;

/// Ranks on hosts, with memory that those of a host share.
class Cluster {
 public:
  Cluster(const std::vector<int>& hosts, bool in_windows, uint64_t seed)
      : network(size_of(hosts), seed), in_windows_(in_windows) {
    HeapWindow::Memories memories;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      memories.push_back(std::make_shared<HeapWindow::Memory>(kWindowBytes));
    }
    for (int rank = 0; rank < size_of(hosts); ++rank) {
      layouts_.push_back(std::make_shared<HostLayout>(HostLayout::of(hosts, rank)));
      HeapWindow::Memories reached(hosts.size());
      for (const int local : layouts_.back()->local_ranks()) {
        reached[static_cast<size_t>(local)] = memories[static_cast<size_t>(local)];
      }
      const bool is_alone = layouts_.back()->local_size() == 1;
      windows_.push_back(is_alone ? nullptr : std::make_shared<HeapWindow>(rank, reached));
      groups_.push_back(group_of_all(rank, size_of(hosts)));
    }
  }

  int size() const { return static_cast<int>(groups_.size()); }

  /// An array of a rank, in its window or in ordinary memory.
  template <class T>
  T* array(int rank, const std::vector<T>& values) {
    const auto& window = windows_[static_cast<size_t>(rank)];
    const size_t bytes = std::max<size_t>(values.size() * sizeof(T), 1);
    arrays_.push_back(in_windows_ && window ? window->allocate(bytes) : allocate(bytes));
    auto* const array = reinterpret_cast<T*>(arrays_.back().get());
    std::ranges::copy(values, array);
    return array;
  }

  void add(int rank, const Call& call, void* data, Algorithm algorithm = Algorithm::kRing) {
    Description description = describe(call);
    description.algorithm = algorithm;
    const auto number = static_cast<size_t>(rank);
    const Surroundings its{network.executor(rank), kSegmentBytes, windows_[number],
                           layouts_[number], nullptr};
    parts.push_back(make_collective(its, call, description, data, *groups_[number]));
  }

  bool is_possible(Algorithm algorithm) const {
    return ringdl::is_possible(algorithm, 1, *layouts_[0], kSegmentBytes);
  }

  /// What a rank has gathered.
  std::vector<int32_t> gathered(int rank) {
    const Gathered& its = *parts[static_cast<size_t>(rank)]->gathered();
    std::vector<int32_t> values(its.data.size() / sizeof(int32_t));
    if (!values.empty()) std::memcpy(values.data(), its.data.data(), its.data.size());
    return values;
  }

  Network network;
  Parts parts;

 private:
  static int size_of(const std::vector<int>& hosts) { return static_cast<int>(hosts.size()); }

  const bool in_windows_;
  std::vector<std::shared_ptr<HostLayout>> layouts_;
  std::vector<std::shared_ptr<Window>> windows_;
  std::vector<SharedGroup> groups_;
  std::vector<std::shared_ptr<std::byte>> arrays_;
};

std::vector<int32_t> values_of(int rank, int64_t count, int64_t from = 0) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] = static_cast<int32_t>((from + i) * 7 + rank * 1000);
  }
  return values;
}

std::vector<int32_t> sums_of(int size, int64_t count) {
  std::vector<int32_t> sums(static_cast<size_t>(count), 0);
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<int32_t> values = values_of(rank, count);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  }
  return sums;
}

Call call_of(Kind kind, std::vector<int64_t> shape) {
  Call call;
  call.kind = kind;
  call.dtype = DType::kInt32;
  call.shape = std::move(shape);
  return call;
}

using Make = std::function<std::unique_ptr<Cluster>()>;

void allreduces(const Make& make, int64_t count) {
  for (const AllreduceAlgorithm* algorithm : algorithms()) {
    const auto cluster = make();
    if (!cluster->is_possible(algorithm->id)) continue;
    std::vector<int32_t*> arrays;
    for (int rank = 0; rank < cluster->size(); ++rank) {
      arrays.push_back(cluster->array(rank, values_of(rank, count)));
      cluster->add(rank, call_of(Kind::kAllreduce, {count}), arrays.back(), algorithm->id);
    }
    CHECK(cluster->network.run(cluster->parts));
    const std::vector<int32_t> expected = sums_of(cluster->size(), count);
    for (const int32_t* array : arrays)
      CHECK(std::ranges::equal(std::span(array, expected.size()), expected));
  }
}

void broadcasts(const Make& make, int64_t count) {
  const auto cluster = make();
  const int root = cluster->size() - 1;
  std::vector<int32_t*> arrays;
  for (int rank = 0; rank < cluster->size(); ++rank) {
    arrays.push_back(cluster->array(rank, values_of(rank, count)));
    Call call = call_of(Kind::kBroadcast, {count});
    call.root = root;
    cluster->add(rank, call, arrays.back());
  }
  CHECK(cluster->network.run(cluster->parts));
  const std::vector<int32_t> expected = values_of(root, count);
  for (const int32_t* array : arrays)
    CHECK(std::ranges::equal(std::span(array, expected.size()), expected));
}

// Ranks have different numbers of rows.
void gathers(const Make& make, Kind kind, int64_t count) {
  const auto cluster = make();
  const int root = cluster->size() / 2;
  std::vector<int32_t> expected;
  for (int rank = 0; rank < cluster->size(); ++rank) {
    const std::vector<int32_t> own = values_of(rank, count * rank);
    expected.insert(expected.end(), own.begin(), own.end());
    Call call = call_of(kind, {count * rank});
    if (kind == Kind::kGather) call.root = root;
    cluster->add(rank, call, cluster->array(rank, own));
  }
  CHECK(cluster->network.run(cluster->parts));
  for (int rank = 0; rank < cluster->size(); ++rank) {
    if (kind == Kind::kAllgather || rank == root) CHECK(cluster->gathered(rank) == expected);
  }
}

// Rank r sends count * (r + to) rows to rank `to`.
void alltoalls(const Make& make, int64_t count) {
  const auto cluster = make();
  const int size = cluster->size();
  std::vector<std::vector<int32_t>> expected(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    Call call = call_of(Kind::kAlltoall, {0});
    for (int to = 0; to < size; ++to) {
      const std::vector<int32_t> part = values_of(rank, count * (rank + to), call.shape[0]);
      auto& its = expected[static_cast<size_t>(to)];
      its.insert(its.end(), part.begin(), part.end());
      call.splits.push_back(count * (rank + to));
      call.shape[0] += call.splits.back();
    }
    cluster->add(rank, call, cluster->array(rank, values_of(rank, call.shape[0])));
  }
  CHECK(cluster->network.run(cluster->parts));
  for (int rank = 0; rank < size; ++rank) {
    CHECK(cluster->gathered(rank) == expected[static_cast<size_t>(rank)]);
  }
}

void scatters(const Make& make, int64_t count) {
  const auto cluster = make();
  const int size = cluster->size();
  Call call = call_of(Kind::kScatter, {0});
  call.root = size - 1;
  for (int to = 0; to < size; ++to) {
    call.splits.push_back(count * to);
    call.shape[0] += count * to;
  }
  for (int rank = 0; rank < size; ++rank) {
    cluster->add(rank, call, cluster->array(rank, values_of(0, call.shape[0])));
  }
  CHECK(cluster->network.run(cluster->parts));
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    CHECK(cluster->gathered(rank) == values_of(0, count * rank, begin));
    begin += count * rank;
  }
}

void reduce_scatters(const Make& make, int64_t count) {
  const auto cluster = make();
  const int size = cluster->size();
  const std::vector<int32_t> sums = sums_of(size, count);
  std::vector<int32_t*> outputs;
  for (int rank = 0; rank < size; ++rank) {
    Call call = call_of(Kind::kReduceScatter, {count});
    outputs.push_back(cluster->array(rank, std::vector<int32_t>(sums.size() + 1, -1)));
    call.output = outputs.back();
    cluster->add(rank, call, cluster->array(rank, values_of(rank, count)));
  }
  CHECK(cluster->network.run(cluster->parts));
  auto begin = sums.begin();
  for (int rank = 0; rank < size; ++rank) {
    const int64_t own = count / size + (rank < count % size ? 1 : 0);
    const int32_t* const output = outputs[static_cast<size_t>(rank)];
    CHECK(std::equal(begin, begin + own, output) && output[own] == -1);
    begin += own;
  }
}

void barriers(const Make& make) {
  const auto cluster = make();
  for (int rank = 0; rank < cluster->size(); ++rank) cluster->add(rank, {}, nullptr);
  CHECK(cluster->network.run(cluster->parts));
}

void refuses() {
  Cluster cluster({0, 0, 1}, false, 0);
  int32_t value = 0;
  Call call = call_of(Kind::kBroadcast, {1});
  call.root = 3;
  CHECK_THROWS(cluster.add(0, call, &value), UsageError, "root 3 is not a rank");
  CHECK_THROWS(cluster.add(0, call_of(Kind::kAllreduce, {1}), &value, Algorithm::kDirect),
               UsageError, "the direct allreduce is for ranks that all share memory");
  call = call_of(Kind::kAlltoall, {3});
  call.splits = {1, 1, 2};
  CHECK_THROWS(cluster.add(0, call, &value), UsageError, "splits adds up to 4 rows");
  call = call_of(Kind::kAllreduce, {1});
  call.compression = DType::kFloat16;
  CHECK_THROWS(cluster.add(0, call, &value), UsageError, "compression is for sums and averages");
}

const std::vector<std::vector<int>> kLayouts = {
    {0},          {0, 0},       {0, 1},          {0, 0, 0},          {0, 0, 0, 0, 0},
    {0, 0, 1, 1}, {0, 1, 0, 1}, {5, 2, 2, 2, 5}, {0, 0, 1, 1, 2, 2}, {0, 1, 2, 0, 1, 2}};

}  // namespace

int main() {
  for (const auto& hosts : kLayouts) {
    for (const bool in_windows : {false, true}) {
      for (uint64_t seed = 0; seed < 4; ++seed) {
        const Make make = [&] { return std::make_unique<Cluster>(hosts, in_windows, seed); };
        for (const int64_t count : {0, 1, 5, 5003}) {
          allreduces(make, count);
          broadcasts(make, count);
          gathers(make, Kind::kAllgather, count);
          gathers(make, Kind::kGather, count);
          alltoalls(make, count / 4);
          scatters(make, count);
          reduce_scatters(make, count);
        }
        barriers(make);
      }
    }
  }
  refuses();
  return check::report();
}

// Every algorithm x dtype x reduction x layout of hosts x kind of memory, against int64 and double;
// the same bits on all ranks, and from run to run with random delays; and ranks that disagree.

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "base/error.h"
#include "collective/planner/algorithms.h"
#include "ranks.h"
#include "reduce/reduce.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 60 * kSecond;
constexpr size_t kSegmentBytes = 16 << 10;
constexpr int64_t kMostElements = 10'007;

const std::vector<std::vector<int>> kLayouts = {{0},
                                                {0, 0},
                                                {0, 1},
                                                {0, 0, 0},
                                                {0, 1, 2},
                                                {0, 0, 0, 1},
                                                {0, 1, 0, 1},
                                                {0, 1, 2, 3, 4},
                                                {0, 1, 1, 2, 2, 2},
                                                {5, 2, 2, 5, 2, 7, 7},
                                                {0, 0, 0, 0, 0, 0, 0, 0},
                                                {0, 0, 0, 0, 1, 1, 1, 1},
                                                {0, 1, 2, 3, 4, 5, 6, 7}};

// None named, and each that may be chosen.
std::vector<std::optional<Algorithm>> choices() {
  std::vector<std::optional<Algorithm>> found = {std::nullopt};
  for (const AllreduceAlgorithm* its : algorithms()) {
    if (its->most_bytes != nullptr) found.emplace_back(its->id);
  }
  return found;
}

// Small enough that all dtypes hold all sums and, except for wrapping, all products.
int64_t item(int rank, int64_t i) { return (i * 7 + rank * 3) % 5 == 0 ? 2 : 1; }
bool truth(int rank, int64_t i) { return (i + rank * rank) % 3 != 0; }

template <class T>
void put(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}

// `value` as one element of the dtype.
void put_as(DType dtype, double value, std::byte* at) {
  const auto narrow = static_cast<float>(value);
  const auto whole = static_cast<int64_t>(value);
  switch (dtype) {
    case DType::kFloat64:
      return put(at, value);
    case DType::kFloat32:
      return put(at, narrow);
    case DType::kFloat16:
    case DType::kBFloat16:
      return find_widening(dtype).narrow(at, &narrow, 1);
    default:  // the lower bytes of an integer come first
      std::memcpy(at, &whole, item_bytes(dtype));
  }
}

double contribution(DType dtype, int rank, int64_t i) {
  return dtype == DType::kBool ? (truth(rank, i) ? 1 : 0) : static_cast<double>(item(rank, i));
}

double expected(DType dtype, Reduction reduction, int size, int64_t i) {
  double sum = 0;
  double product = 1;
  double least = 2;
  double most = 0;
  int64_t every = -1;
  int64_t any = 0;
  int64_t odd = 0;
  for (int rank = 0; rank < size; ++rank) {
    const double value = contribution(dtype, rank, i);
    sum += value;
    product *= value;
    least = std::min(least, value);
    most = std::max(most, value);
    const auto whole = static_cast<int64_t>(value);
    every &= whole;
    any |= whole;
    odd ^= whole;
  }
  if (reduction == Reduction::kBitAnd) return static_cast<double>(every);
  if (reduction == Reduction::kBitOr) return static_cast<double>(any);
  if (reduction == Reduction::kBitXor) return static_cast<double>(odd);
  if (dtype == DType::kBool) {
    return reduction == Reduction::kSum || reduction == Reduction::kMax ? most : least;
  }
  switch (reduction) {
    case Reduction::kSum:
      return sum;
    case Reduction::kAverage:
      return sum / size;
    case Reduction::kMin:
      return least;
    case Reduction::kMax:
      return most;
    case Reduction::kProduct:
      return product;
    default:
      return 0;
  }
}

// One rank's arrays: all in shared memory, all ordinary, or, by rank and turn, some.
struct Memory {
  Driver& driver;
  int turn = 0;

  std::shared_ptr<std::byte> next(size_t bytes) {
    ++turn;
    const bool is_shared = turn % 3 == 0 || (turn % 3 == 1 && (turn + driver.rank()) % 2 == 0);
    return is_shared ? driver.allocate(bytes) : allocate(bytes);
  }
};

struct Pending {
  std::shared_ptr<std::byte> array;
  size_t bytes;
  std::shared_ptr<Work> work;
};

using Item = std::function<double(int64_t)>;

// Elements that are made once for all ranks and calls: the sanitizers see each that is written.
const std::byte* elements(DType dtype, const std::string& what, const Item& item) {
  static std::mutex mutex;
  static std::map<std::string, std::vector<std::byte>> all;
  const std::lock_guard guard(mutex);
  std::vector<std::byte>& its = all[std::string(name_of(dtype)) + " " + what];
  if (its.empty()) {
    const size_t width = item_bytes(dtype);
    its.resize(static_cast<size_t>(kMostElements) * width);
    for (int64_t i = 0; i < kMostElements; ++i) {
      put_as(dtype, item(i), its.data() + static_cast<size_t>(i) * width);
    }
  }
  return its.data();
}

Pending begin(Driver& driver, Memory& memory, Call call, int64_t count, const std::byte* elements) {
  const size_t width = item_bytes(call.dtype);
  Pending pending{nullptr, static_cast<size_t>(count) * width, nullptr};
  pending.array = memory.next(pending.bytes);
  std::memcpy(pending.array.get(), elements, pending.bytes);
  call.shape = {count};
  call.memory = check::memory_of_tests();
  pending.work = driver.submit(call, pending.array.get());
  return pending;
}

// All reductions at once, and sums that show their order, whose bits are compared by a digest.
void reduce_all(Driver& driver, Memory& memory, Call call, int64_t count,
                std::vector<uint64_t>& digests) {
  const DType dtype = call.dtype;
  const std::string rank = std::to_string(driver.rank());
  std::vector<Pending> pending;
  std::vector<Reduction> reductions;
  for (int r = 0; r < kReductionCount; ++r) {
    call.reduction = static_cast<Reduction>(r);
    if (!has_reduction(dtype, call.reduction)) continue;
    reductions.push_back(call.reduction);
    const std::byte* const own = elements(
        dtype, "of rank " + rank, [&](int64_t i) { return contribution(dtype, driver.rank(), i); });
    pending.push_back(begin(driver, memory, call, count, own));
  }
  if (is_floating(dtype)) {
    call.reduction = Reduction::kAverage;
    std::minstd_rand random(static_cast<unsigned>(driver.rank() + 1));
    std::normal_distribution<double> normal;
    const std::byte* const own =
        elements(dtype, "noise of rank " + rank, [&](int64_t) { return normal(random); });
    pending.push_back(begin(driver, memory, call, count, own));
  }
  for (const Pending& each : pending) driver.wait(each.work, kTimeout);
  for (size_t r = 0; r < reductions.size(); ++r) {
    const std::string what = std::to_string(static_cast<int>(reductions[r])) + " of ranks " +
                             std::to_string(driver.size());
    const std::byte* const right = elements(
        dtype, what, [&](int64_t i) { return expected(dtype, reductions[r], driver.size(), i); });
    CHECK(std::memcmp(pending[r].array.get(), right, pending[r].bytes) == 0);
  }
  if (is_floating(dtype)) {
    const Pending& noise = pending.back();
    digests.push_back(hash_of({reinterpret_cast<const char*>(noise.array.get()), noise.bytes}));
  }
}

std::vector<uint64_t> run(Driver& driver, const HostLayout& layout) {
  Memory memory{driver};
  std::vector<uint64_t> digests;
  for (const std::optional<Algorithm> algorithm : choices()) {
    for (int d = 0; d < kDTypeCount; ++d) {
      Call call;
      call.kind = Kind::kAllreduce;
      call.dtype = static_cast<DType>(d);
      call.algorithm = algorithm;
      for (const int64_t count : {int64_t{3}, kMostElements}) {
        const size_t bytes = static_cast<size_t>(count) * item_bytes(call.dtype);
        if (algorithm && !is_possible(*algorithm, bytes, layout, kSegmentBytes)) continue;
        reduce_all(driver, memory, call, count, digests);
      }
    }
  }
  return digests;
}

// One rank means something else: no rank may have a result. The arrays of calls that have failed
// are kept, as they may still be sent.
void disagree(Driver& driver, const HostLayout& layout, std::vector<Pending>& kept) {
  Memory memory{driver};
  const int size = driver.size();
  const std::byte* const ones = elements(DType::kFloat32, "ones", [](int64_t) { return 1; });
  for (const std::optional<Algorithm> algorithm : choices()) {
    for (const int64_t count : {int64_t{3}, kMostElements}) {
      const size_t bytes = static_cast<size_t>(count) * sizeof(float);
      if (algorithm && !is_possible(*algorithm, bytes, layout, kSegmentBytes)) continue;
      for (const int wrong : {0, size / 2, size - 1}) {
        Call call;
        call.kind = Kind::kAllreduce;
        call.dtype = DType::kFloat32;
        call.algorithm = algorithm;
        call.reduction = driver.rank() == wrong ? Reduction::kMax : Reduction::kSum;
        kept.push_back(begin(driver, memory, call, count, ones));
        CHECK_THROWS(driver.wait(kept.back().work, kTimeout), MismatchError, "reduction");
      }
    }
  }
}

void test_disagreements() {
  for (const std::vector<int>& hosts : kLayouts) {
    if (hosts.size() == 1) continue;
    for (const uint64_t delay_seed : {0u, 3u}) {
      const auto windows = check::connected_windows(hosts, 256 << 20);
      std::vector<std::vector<Pending>> kept(hosts.size());
      EngineOptions options;
      options.segment_bytes = kSegmentBytes;
      check::run_ranks(static_cast<int>(hosts.size()), options, {4096, delay_seed},
                       [&](Driver& driver) {
                         const auto rank = static_cast<size_t>(driver.rank());
                         driver.set_window(windows[rank], hosts);
                         disagree(driver, HostLayout::of(hosts, driver.rank()), kept[rank]);
                       });
    }
  }
}

void test_matrix() {
  for (const std::vector<int>& hosts : kLayouts) {
    const int size = static_cast<int>(hosts.size());
    std::vector<std::vector<uint64_t>> runs;
    for (const uint64_t delay_seed : {0u, 3u}) {
      const auto windows = check::connected_windows(hosts, 256 << 20);
      std::vector<std::vector<uint64_t>> digests(hosts.size());
      EngineOptions options;
      options.segment_bytes = kSegmentBytes;
      check::run_ranks(size, options, {4096, delay_seed}, [&](Driver& driver) {
        const auto rank = static_cast<size_t>(driver.rank());
        driver.set_window(windows[rank], hosts);
        digests[rank] = run(driver, HostLayout::of(hosts, driver.rank()));
      });
      for (const auto& of_rank : digests) CHECK(of_rank == digests[0]);
      runs.push_back(digests[0]);
    }
    CHECK(runs[0] == runs[1]);
  }
}

}  // namespace

int main() {
  test_matrix();
  test_disagreements();
  return check::report();
}

// Every collective over threads, against what plain code computes: all sizes of communicators, odd
// counts, small segments, small and large messages, with and without random delays.

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "ranks.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 60 * kSecond;

std::vector<EngineOptions> option_sets() {
  EngineOptions small;  // many segments, nothing inline: every message is granted
  small.segment_bytes = 64;
  small.inline_bytes = 0;
  EngineOptions mixed;  // some segments are inline, others are not
  mixed.segment_bytes = 256;
  mixed.inline_bytes = 128;
  return {small, mixed, EngineOptions{}};
}

int64_t value(int rank, int64_t i) { return (i * 7 + rank * 13) % 101 - 50; }

void allreduce(Driver& driver, int64_t count) {
  std::vector<int32_t> data(static_cast<size_t>(count));
  for (const Reduction reduction : {Reduction::kSum, Reduction::kAverage, Reduction::kMax}) {
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<int32_t>(value(driver.rank(), i));
    const auto work =
        driver.submit({Kind::kAllreduce, DType::kInt32, reduction, -1, {count}, ""}, data.data());
    driver.wait(work, kTimeout);
    bool right = true;
    for (int64_t i = 0; i < count; ++i) {
      int64_t sum = 0;
      int64_t largest = -1000;
      for (int rank = 0; rank < driver.size(); ++rank) {
        sum += value(rank, i);
        largest = std::max(largest, value(rank, i));
      }
      const int64_t expected = reduction == Reduction::kSum       ? sum
                               : reduction == Reduction::kAverage ? sum / driver.size()
                                                                  : largest;
      right &= data[i] == expected;
    }
    CHECK(right);
  }
}

void broadcast(Driver& driver, int64_t count) {
  for (int root = 0; root < driver.size(); ++root) {
    std::vector<int32_t> data(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<int32_t>(value(driver.rank(), i));
    driver.wait(
        driver.submit({Kind::kBroadcast, DType::kInt32, {}, root, {count}, ""}, data.data()),
        kTimeout);
    bool right = true;
    for (int64_t i = 0; i < count; ++i) right &= data[i] == value(root, i);
    CHECK(right);
  }
}

void allgather(Driver& driver, int64_t count) {
  const auto rows = [&](int rank) { return rank % 3 == 1 ? 0 : count + rank; };
  std::vector<int32_t> data(static_cast<size_t>(rows(driver.rank())));
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<int32_t>(value(driver.rank(), static_cast<int64_t>(i)));
  }
  const auto work = driver.submit(
      {Kind::kAllgather, DType::kInt32, {}, -1, {rows(driver.rank())}, ""}, data.data());
  driver.wait(work, kTimeout);
  const std::byte* at = work->collective->gathered()->data.data();
  bool right = true;
  for (int rank = 0; rank < driver.size(); ++rank) {
    right &= work->collective->gathered()->lengths[static_cast<size_t>(rank)] == 4 * rows(rank);
    for (int64_t i = 0; i < rows(rank); ++i, at += 4) {
      int32_t item;
      std::memcpy(&item, at, 4);
      right &= item == value(rank, i);
    }
  }
  CHECK(right);
}

}  // namespace

int main() {
  for (int size = 1; size <= 8; ++size) {
    for (const EngineOptions& options : option_sets()) {
      for (const uint64_t delay_seed : {0u, 1u}) {
        check::run_ranks(size, options, {100, delay_seed}, [&](Driver& driver) {
          for (const int64_t count : {0, 1, 3, 17, 100, 1000}) {
            allreduce(driver, count);
            broadcast(driver, count);
            allgather(driver, count);
            driver.wait(driver.submit({}, nullptr), kTimeout);
          }
        });
      }
    }
  }
  return check::report();
}

// Matching by key, mismatches, the diagnosis, timeouts, buckets and threads, over threads.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "engine/driver.h"
#include "engine/gradient_buckets.h"
#include "hooked.h"
#include "ranks.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 60 * kSecond;

Call sum_of(int64_t count, const std::string& name, DType dtype = DType::kFloat32) {
  return {Kind::kAllreduce, dtype, Reduction::kSum, -1, {count}, name};
}

void any_order(Driver& driver) {
  constexpr int kWorks = 20;
  for (const int64_t count : {10, 5000}) {
    std::vector<std::vector<float>> data(kWorks);
    std::vector<std::shared_ptr<Work>> works(kWorks);
    std::vector<int> order(kWorks);
    for (int i = 0; i < kWorks; ++i) order[i] = i;
    std::mt19937 random(static_cast<unsigned>(driver.rank()));
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      data[i].assign(count, static_cast<float>(i + driver.rank()));
      works[i] = driver.submit(sum_of(count, "w" + std::to_string(i)), data[i].data());
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      driver.wait(works[i], kTimeout);
      const int size = driver.size();
      const auto expected = static_cast<float>(i * size + size * (size - 1) / 2);
      CHECK(std::all_of(data[i].begin(), data[i].end(), [&](float x) { return x == expected; }));
    }
  }
}

// Rank `wrong` passes something else; every rank is notified, and three large works beside it end
// well, a hundred times over.
// A failed work may still be sending from its buffer, so the buffers are kept.
void mismatches(Driver& driver, std::vector<std::vector<double>>& kept) {
  const int wrong = driver.size() - 1;
  for (int i = 0; i < 100; ++i) {
    std::vector<std::vector<float>> healthy(3, std::vector<float>(3000, 1.0f));
    std::vector<std::shared_ptr<Work>> works;
    for (int k = 0; k < 3; ++k) {
      works.push_back(driver.submit(sum_of(3000, "h" + std::to_string(k)), healthy[k].data()));
    }
    std::vector<double>& data = kept.emplace_back(2000, 1.0);
    Call call = sum_of(2000, "bad");
    std::string field = "shape";
    if (driver.rank() == wrong && i % 3 == 0) call.shape = {1999};
    if (i % 3 == 1) {
      field = "dtype";
      if (driver.rank() == wrong) call.dtype = DType::kFloat64;
    }
    if (i % 3 == 2) {
      field = "reduction";
      if (driver.rank() == wrong) call.reduction = Reduction::kMax;
    }
    CHECK_THROWS(driver.wait(driver.submit(call, data.data()), kTimeout), MismatchError, field);
    for (int k = 0; k < 3; ++k) {
      driver.wait(works[k], kTimeout);
      CHECK(std::all_of(healthy[k].begin(), healthy[k].end(),
                        [&](float x) { return x == static_cast<float>(driver.size()); }));
    }
  }
  driver.wait(driver.submit({}, nullptr), kTimeout);
  CHECK(driver.stats()["parked_keys"] < 10.0);  // faster ranks may have begun what follows
  CHECK_EQ(driver.stats()["works_in_flight"], 0.0);
}

void wrong_root(Driver& driver) {
  float x = 1;
  Call call{Kind::kBroadcast, DType::kFloat32, {}, driver.rank() == 1 ? 1 : 0, {1}, "b"};
  CHECK_THROWS(driver.wait(driver.submit(call, &x), kTimeout), MismatchError, "root");
  call.root = 7;
  CHECK_THROWS(driver.submit(call, &x), UsageError, "root");
}

void wrong_name(Driver& driver) {
  float x = 1;
  const std::string name = driver.rank() == 1 ? "typo" : "right";
  const int64_t begin = now_ns();
  CHECK_THROWS(driver.wait(driver.submit(sum_of(1, name), &x), kTimeout), MismatchError, "typo");
  CHECK(now_ns() - begin < 5 * kSecond);
  x = 1;  // what failed may have left a partial sum
  driver.wait(driver.submit(sum_of(1, "right"), &x), kTimeout);
  CHECK_EQ(x, static_cast<float>(driver.size()));
}

void late_rank(Driver& driver) {
  float x = 1;
  if (driver.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  }
  const auto work = driver.submit(sum_of(1, "late"), &x);
  if (driver.rank() != 1) {
    CHECK_THROWS(driver.wait(work, kSecond / 2), StallError, "rank 1 has not arrived");
  }
  driver.wait(work, kTimeout);
  CHECK_EQ(x, static_cast<float>(driver.size()));
}

// The last rank shuts down while the others wait for a key that it never submitted.
void left_rank(Driver& driver) {
  if (driver.rank() == driver.size() - 1) return;
  float x = 1;
  CHECK_THROWS(driver.wait(driver.submit(sum_of(1, "gone"), &x), kTimeout), MismatchError,
               "rank " + std::to_string(driver.size() - 1) + " has shut down");
}

void buckets(const std::shared_ptr<Driver>& driver) {
  std::vector<GradientSpec> specs;
  for (int i = 0; i < 30; ++i) {
    specs.push_back(
        {"g" + std::to_string(i), {i + 1, 3}, i % 4 == 0 ? DType::kFloat64 : DType::kFloat32, {}});
  }
  const auto made =
      check::make_buckets(driver, specs, plan_buckets(specs, 300, 100), 0, Reduction::kAverage);
  GradientBuckets& buckets = *made;
  std::mt19937 random(static_cast<unsigned>(driver->rank()));
  const auto value = [](int rank, int i, int round) { return rank * 4 + i + round; };
  for (int round = 0; round < 20; ++round) {
    std::vector<int> order(specs.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      if (i == 5) continue;                         // missing on all
      if (i == 6 && driver->rank() != 0) continue;  // produced on rank 0 only
      const int64_t count = specs[i].count();
      if (specs[i].dtype == DType::kFloat64) {
        std::fill_n(reinterpret_cast<double*>(buckets.gradient(i)), count,
                    value(driver->rank(), i, round));
      } else {
        std::fill_n(reinterpret_cast<float*>(buckets.gradient(i)), count,
                    static_cast<float>(value(driver->rank(), i, round)));
      }
      buckets.ready(i);
    }
    if (round == 0) CHECK_THROWS(buckets.ready(0), UsageError, "ready already");
    const std::vector<bool> produced = buckets.wait(kTimeout);
    for (int i = 0; i < 30; ++i) {
      CHECK_EQ(produced[i], i != 5);
      double sum = 0;
      for (int rank = 0; rank < driver->size(); ++rank) {
        if (i != 5 && (i != 6 || rank == 0)) sum += value(rank, i, round);
      }
      const double expected = sum / driver->size();
      const bool wide = specs[i].dtype == DType::kFloat64;
      const double got = wide ? *reinterpret_cast<double*>(buckets.gradient(i))
                              : *reinterpret_cast<float*>(buckets.gradient(i));
      CHECK(got == (wide ? expected : static_cast<float>(expected)));
    }
  }
}

void many_threads(Driver& driver) {
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 30; ++i) {
        std::vector<float> data(700, 1.0f);
        driver.wait(driver.submit(sum_of(700, "t" + std::to_string(t)), data.data()), kTimeout);
        right += data[699] == static_cast<float>(driver.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(right.load(), 120);
}

// Nobody waits: the progress threads alone bring the work to its end.
void progress_alone(Driver& driver) {
  std::vector<float> data(100000, 1.0f);
  const auto work = driver.submit(sum_of(100000, "alone"), data.data());
  driver.wake();
  for (int i = 0; i < 1000 && !work->ended(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(work->ended());
}

// More works than there are tags.
void many_works(Driver& driver) {
  constexpr int kWorks = 600;
  std::vector<std::vector<float>> data(kWorks, std::vector<float>(200, 1.0f));
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < kWorks; ++i) {
    const int name = driver.rank() % 2 == 0 ? i : kWorks - 1 - i;
    works.push_back(driver.submit(sum_of(200, "m" + std::to_string(name)), data[i].data()));
  }
  for (const auto& work : works) driver.wait(work, kTimeout);
  CHECK(std::all_of(data.begin(), data.end(), [&](const auto& array) {
    return array[199] == static_cast<float>(driver.size());
  }));
}

void one_thread_only() {
  Driver driver(std::move(make_loopback(1)[0]), {}, false);
  std::thread([&] {
    CHECK_THROWS(driver.submit({}, nullptr), UsageError, "second thread");
  }).join();
  driver.shutdown();
  CHECK_THROWS(driver.submit({}, nullptr), UsageError, "shut down");
}

// MPI moves the bytes of a long message in polls in which nothing ends. They take time, and must
// not make the progress thread sleep as if it had polled in vain for that time.
void long_looks() {
  constexpr int kLongLooks = 40;
  constexpr int64_t kLongLookNs = 2 * kMillisecond;
  std::atomic<bool> begun = false;
  std::atomic<int> looks = 0;
  const auto wrap = [&](std::unique_ptr<Transport> below) -> std::unique_ptr<Transport> {
    check::Hooks hooks;
    if (below->rank() == 0) {
      hooks.may_poll = [&] {
        const bool is_long = begun && ++looks % 4 == 0;
        const int64_t end = thread_cpu_ns() + (is_long ? kLongLookNs : 0);
        while (thread_cpu_ns() < end) {
        }
        return true;
      };
    }
    return std::make_unique<check::Hooked>(std::move(below), std::move(hooks));
  };
  check::run_drivers(
      2, {}, {},
      [&](const std::shared_ptr<Driver>& driver) {
        std::vector<float> data(10, 1.0f);
        if (driver->rank() == 0) {
          const auto work = driver->submit(sum_of(10, "late"), data.data());
          begun = true;
          const int64_t begin = now_ns();
          while (looks < 4 * kLongLooks) sleep_ns(kMillisecond);
          CHECK(now_ns() - begin <
                kLongLooks * 16 * kLongLookNs);  // it would sleep 32 times as long
          begun = false;
          driver->wait(driver->submit(sum_of(10, "now"), data.data()), kTimeout);
          driver->wait(work, kTimeout);
        } else {
          driver->wait(driver->submit(sum_of(10, "now"), data.data()), kTimeout);
          driver->wait(driver->submit(sum_of(10, "late"), data.data()), kTimeout);
        }
      },
      wrap);
}

}  // namespace

int main() {
  EngineOptions granted;
  granted.segment_bytes = 256;
  granted.inline_bytes = 0;
  for (const int size : {2, 3, 4}) {
    for (const EngineOptions& options : {EngineOptions{}, granted}) {
      for (const uint64_t delay_seed : {0u, 1u}) {
        std::vector<std::vector<std::vector<double>>> kept(static_cast<size_t>(size));
        check::run_ranks(size, options, {512, delay_seed}, [&kept](Driver& driver) {
          any_order(driver);
          mismatches(driver, kept[static_cast<size_t>(driver.rank())]);
          wrong_root(driver);
          many_threads(driver);
          many_works(driver);
          progress_alone(driver);
        });
      }
    }
    check::run_ranks(size, {}, {}, [](Driver& driver) {
      wrong_name(driver);
      late_rank(driver);
      left_rank(driver);
    });
    check::run_drivers(size, granted, {512, 1}, buckets);
  }
  one_thread_only();
  long_looks();
  return check::report();
}

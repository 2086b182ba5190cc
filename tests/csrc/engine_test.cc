// Matching by key, mismatches, the diagnosis, timeouts, buckets and threads, over threads.

#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "engine/gradient_buckets.h"
#include "hooked.h"
#include "ranks.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 60 * kSecond;

Call sum_of(int64_t count, const std::string& name, DType dtype = DType::kFloat32) {
  return {Kind::kAllreduce, dtype, Reduction::kSum, -1, {count}, name};
}

void any_order(Engine& engine) {
  constexpr int kWorks = 20;
  for (const int64_t count : {10, 5000}) {
    std::vector<std::vector<float>> data(kWorks);
    std::vector<std::shared_ptr<Work>> works(kWorks);
    std::vector<int> order(kWorks);
    for (int i = 0; i < kWorks; ++i) order[i] = i;
    std::mt19937 random(static_cast<unsigned>(engine.rank()));
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      data[i].assign(count, static_cast<float>(i + engine.rank()));
      works[i] = engine.submit(sum_of(count, "w" + std::to_string(i)), data[i].data());
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      engine.wait(works[i], kTimeout);
      const int size = engine.size();
      const auto expected = static_cast<float>(i * size + size * (size - 1) / 2);
      CHECK(std::all_of(data[i].begin(), data[i].end(), [&](float x) { return x == expected; }));
    }
  }
}

// Rank `wrong` passes something else; every rank hears of it, and three large works beside it end
// well, a hundred times over.
// A failed work may be sending from its buffer still when it fails, so the buffers are kept.
void mismatches(Engine& engine, std::vector<std::vector<double>>& kept) {
  const int wrong = engine.size() - 1;
  for (int i = 0; i < 100; ++i) {
    std::vector<std::vector<float>> healthy(3, std::vector<float>(3000, 1.0f));
    std::vector<std::shared_ptr<Work>> works;
    for (int k = 0; k < 3; ++k) {
      works.push_back(engine.submit(sum_of(3000, "h" + std::to_string(k)), healthy[k].data()));
    }
    std::vector<double>& data = kept.emplace_back(2000, 1.0);
    Call call = sum_of(2000, "bad");
    std::string field = "shape";
    if (engine.rank() == wrong && i % 3 == 0) call.shape = {1999};
    if (i % 3 == 1) {
      field = "dtype";
      if (engine.rank() == wrong) call.dtype = DType::kFloat64;
    }
    if (i % 3 == 2) {
      field = "reduction";
      if (engine.rank() == wrong) call.reduction = Reduction::kMax;
    }
    CHECK_THROWS(engine.wait(engine.submit(call, data.data()), kTimeout), MismatchError, field);
    for (int k = 0; k < 3; ++k) {
      engine.wait(works[k], kTimeout);
      CHECK(std::all_of(healthy[k].begin(), healthy[k].end(),
                        [&](float x) { return x == static_cast<float>(engine.size()); }));
    }
  }
  engine.wait(engine.submit({}, nullptr), kTimeout);
  CHECK(engine.stats()["parked_keys"] < 10.0);  // faster ranks may have begun what follows
  CHECK_EQ(engine.stats()["works_in_flight"], 0.0);
}

void wrong_root(Engine& engine) {
  float x = 1;
  Call call{Kind::kBroadcast, DType::kFloat32, {}, engine.rank() == 1 ? 1 : 0, {1}, "b"};
  CHECK_THROWS(engine.wait(engine.submit(call, &x), kTimeout), MismatchError, "root");
  call.root = 7;
  CHECK_THROWS(engine.submit(call, &x), UsageError, "root");
}

void wrong_name(Engine& engine) {
  float x = 1;
  const std::string name = engine.rank() == 1 ? "typo" : "right";
  const int64_t begin = now_ns();
  CHECK_THROWS(engine.wait(engine.submit(sum_of(1, name), &x), kTimeout), MismatchError, "typo");
  CHECK(now_ns() - begin < 5 * kSecond);
  x = 1;  // what failed may have left a partial sum
  engine.wait(engine.submit(sum_of(1, "right"), &x), kTimeout);
  CHECK_EQ(x, static_cast<float>(engine.size()));
}

void late_rank(Engine& engine) {
  float x = 1;
  if (engine.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  }
  const auto work = engine.submit(sum_of(1, "late"), &x);
  if (engine.rank() != 1) {
    CHECK_THROWS(engine.wait(work, kSecond / 2), StallError, "rank 1 has not come");
  }
  engine.wait(work, kTimeout);
  CHECK_EQ(x, static_cast<float>(engine.size()));
}

// The last rank shuts down while the others wait for a key that it never submitted.
void left_rank(Engine& engine) {
  if (engine.rank() == engine.size() - 1) return;
  float x = 1;
  CHECK_THROWS(engine.wait(engine.submit(sum_of(1, "gone"), &x), kTimeout), MismatchError,
               "rank " + std::to_string(engine.size() - 1) + " has shut down");
}

void buckets(const std::shared_ptr<Engine>& engine) {
  std::vector<GradientSpec> specs;
  for (int i = 0; i < 30; ++i) {
    specs.push_back(
        {"g" + std::to_string(i), {i + 1, 3}, i % 4 == 0 ? DType::kFloat64 : DType::kFloat32, {}});
  }
  GradientBuckets buckets(engine, specs, plan_buckets(specs, 300, 100), Reduction::kAverage, 0,
                          engine->group_of_all_ranks());
  std::mt19937 random(static_cast<unsigned>(engine->rank()));
  const auto value = [](int rank, int i, int round) { return rank * 4 + i + round; };
  for (int round = 0; round < 20; ++round) {
    std::vector<int> order(specs.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      if (i == 5) continue;                         // missing on all
      if (i == 6 && engine->rank() != 0) continue;  // produced on rank 0 only
      const int64_t count = specs[i].count();
      if (specs[i].dtype == DType::kFloat64) {
        std::fill_n(reinterpret_cast<double*>(buckets.gradient(i)), count,
                    value(engine->rank(), i, round));
      } else {
        std::fill_n(reinterpret_cast<float*>(buckets.gradient(i)), count,
                    static_cast<float>(value(engine->rank(), i, round)));
      }
      buckets.ready(i);
    }
    if (round == 0) CHECK_THROWS(buckets.ready(0), UsageError, "ready already");
    const std::vector<bool> produced = buckets.wait(kTimeout);
    for (int i = 0; i < 30; ++i) {
      CHECK_EQ(produced[i], i != 5);
      double sum = 0;
      for (int rank = 0; rank < engine->size(); ++rank) {
        if (i != 5 && (i != 6 || rank == 0)) sum += value(rank, i, round);
      }
      const double expected = sum / engine->size();
      const bool wide = specs[i].dtype == DType::kFloat64;
      const double got = wide ? *reinterpret_cast<double*>(buckets.gradient(i))
                              : *reinterpret_cast<float*>(buckets.gradient(i));
      CHECK(got == (wide ? expected : static_cast<float>(expected)));
    }
  }
}

void many_threads(Engine& engine) {
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 30; ++i) {
        std::vector<float> data(700, 1.0f);
        engine.wait(engine.submit(sum_of(700, "t" + std::to_string(t)), data.data()), kTimeout);
        right += data[699] == static_cast<float>(engine.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(right.load(), 120);
}

// Nobody waits: the progress threads alone bring the work to its end.
void progress_alone(Engine& engine) {
  std::vector<float> data(100000, 1.0f);
  const auto work = engine.submit(sum_of(100000, "alone"), data.data());
  engine.wake();
  for (int i = 0; i < 1000 && !work->ended(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(work->ended());
}

// More works than there are tags.
void many_works(Engine& engine) {
  constexpr int kWorks = 600;
  std::vector<std::vector<float>> data(kWorks, std::vector<float>(200, 1.0f));
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < kWorks; ++i) {
    const int name = engine.rank() % 2 == 0 ? i : kWorks - 1 - i;
    works.push_back(engine.submit(sum_of(200, "m" + std::to_string(name)), data[i].data()));
  }
  for (const auto& work : works) engine.wait(work, kTimeout);
  CHECK(std::all_of(data.begin(), data.end(), [&](const auto& array) {
    return array[199] == static_cast<float>(engine.size());
  }));
}

void one_thread_only() {
  EngineOptions options;
  options.threads = false;
  Engine engine(std::move(make_loopback(1)[0]), options);
  std::thread([&] {
    CHECK_THROWS(engine.submit({}, nullptr), UsageError, "second thread");
  }).join();
  engine.shutdown();
  CHECK_THROWS(engine.submit({}, nullptr), UsageError, "shut down");
}

// MPI moves the bytes of a long message in looks in which nothing ends. They take time, and must
// not make the progress thread sleep as if it had looked in vain so long.
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
  check::run_engines(
      2, {}, {},
      [&](const std::shared_ptr<Engine>& engine) {
        std::vector<float> data(10, 1.0f);
        if (engine->rank() == 0) {
          const auto work = engine->submit(sum_of(10, "late"), data.data());
          begun = true;
          const int64_t begin = now_ns();
          while (looks < 4 * kLongLooks) sleep_ns(kMillisecond);
          CHECK(now_ns() - begin <
                kLongLooks * 16 * kLongLookNs);  // it would sleep 32 times so long
          begun = false;
          engine->wait(engine->submit(sum_of(10, "now"), data.data()), kTimeout);
          engine->wait(work, kTimeout);
        } else {
          engine->wait(engine->submit(sum_of(10, "now"), data.data()), kTimeout);
          engine->wait(engine->submit(sum_of(10, "late"), data.data()), kTimeout);
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
        check::run_ranks(size, options, {512, delay_seed}, [&kept](Engine& engine) {
          any_order(engine);
          mismatches(engine, kept[static_cast<size_t>(engine.rank())]);
          wrong_root(engine);
          many_threads(engine);
          many_works(engine);
          progress_alone(engine);
        });
      }
    }
    check::run_ranks(size, {}, {}, [](Engine& engine) {
      wrong_name(engine);
      late_rank(engine);
      left_rank(engine);
    });
    check::run_engines(size, granted, {512, 1}, buckets);
  }
  one_thread_only();
  long_looks();
  return check::report();
}

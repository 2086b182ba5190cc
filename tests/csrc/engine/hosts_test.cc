// Works in memory that ranks of one host share: in slots, direct, hierarchical, buckets.

#include <sched.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "check.h"
#include "collective/shared/direct_allreduce.h"
#include "collective/shared/slot_allreduce.h"
#include "ranks.h"
#include "reduce/reduce_many.h"
#include "transport/shm/segment_window.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 20 * kSecond;

// Ranks put and pass at random, at any pace: all find the same outcome, and what was put.
void test_slots() {
  constexpr int kRanks = 3;
  constexpr uint64_t kInstances = 3000;
  std::vector<Buffer> memory;
  std::vector<std::byte*> begins;
  for (int rank = 0; rank < kRanks; ++rank) {
    memory.emplace_back(Slots::bytes());
    std::memset(memory.back().data(), 0, Slots::bytes());
    begins.push_back(memory.back().data());
  }
  const auto puts = [](uint64_t instance, int rank) {
    return (instance * 2654435761u >> 7) % 10 != static_cast<uint64_t>(rank);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto slots = std::make_shared<Slots>(begins, rank);
      std::mt19937_64 random(static_cast<uint64_t>(rank));
      for (uint64_t instance = 0; instance < kInstances; ++instance) {
        if (random() % 20 == 0) sleep_ns(static_cast<int64_t>(random() % 200000));
        if (!puts(instance, rank)) {
          slots->pass(instance);
          continue;
        }
        const uint64_t own = instance * 10 + static_cast<uint64_t>(rank);
        SlotExchange exchange({slots, instance, instance}, rank);
        Polled state = Polled::kAwaitsRanks;
        while (state == Polled::kAwaitsRanks) {
          state = exchange.step({reinterpret_cast<const std::byte*>(&own), sizeof(own)});
          sched_yield();
        }
        bool all_put = true;
        for (int other = 0; other < kRanks; ++other) all_put &= puts(instance, other);
        CHECK_EQ(state == Polled::kDone, all_put);
        for (int other = 0; other < kRanks && all_put; ++other) {
          uint64_t theirs = 0;
          std::memcpy(&theirs, exchange.payload(other), sizeof(theirs));
          CHECK_EQ(theirs, instance * 10 + static_cast<uint64_t>(other));
        }
        exchange.finish();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The last of three calls passes before the first could put: then all find that it has passed.
void test_slots_passed_over() {
  Buffer memory(Slots::bytes());
  Buffer others(Slots::bytes());
  std::memset(memory.data(), 0, Slots::bytes());
  std::memset(others.data(), 0, Slots::bytes());
  const std::vector<std::byte*> begins = {memory.data(), others.data()};
  const auto first = std::make_shared<Slots>(begins, 0);
  const auto second = std::make_shared<Slots>(begins, 1);
  const uint64_t own = 7;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(&own), sizeof(own));
  for (uint64_t instance = 0; instance < 2; ++instance) first->pass(instance);
  SlotExchange early({first, 2, 1}, 0);  // the other rank has finished nothing yet
  CHECK(early.step(bytes) == Polled::kAwaitsRanks);
  first->pass(3);
  CHECK(early.step(bytes) == Polled::kElsewhere);
  second->pass(0);
  second->pass(1);
  SlotExchange late({second, 2, 1}, 1);
  CHECK(late.step(bytes) == Polled::kElsewhere);
}

Call allreduce_of(int64_t count, const std::string& name = "") {
  return {Kind::kAllreduce, DType::kFloat32, Reduction::kSum, -1, {count}, name};
}

void test_direct_works() {
  for (const int size : {2, 3, 5}) {
    const auto windows = check::connected_windows(size, 64 << 20);
    for (const bool delayed : {false, true}) {
      check::run_ranks(size, {}, {4096, delayed ? 7u : 0u}, [&](Driver& driver) {
        const auto rank = static_cast<size_t>(driver.rank());
        driver.set_window(windows[rank], std::vector<int>(static_cast<size_t>(size), 0));
        std::mt19937_64 random(rank);
        for (int round = 0; round < 6; ++round) {
          std::vector<std::shared_ptr<std::byte>> arrays;
          std::vector<std::shared_ptr<Work>> works;
          for (int i = 0; i < 8; ++i) {
            const int64_t count = 5000 + 30011 * i;
            arrays.push_back(windows[rank]->allocate(4 * static_cast<size_t>(count)));
            std::fill_n(reinterpret_cast<float*>(arrays.back().get()), count,
                        static_cast<float>(driver.rank() + i));
            if (random() % 4 == 0) sleep_ns(static_cast<int64_t>(random() % 2000000));
            works.push_back(driver.submit(allreduce_of(count), arrays.back().get()));
          }
          for (int i = 7; i >= 0; --i) {
            driver.wait(works[static_cast<size_t>(i)], kTimeout);
            const auto* values =
                reinterpret_cast<const float*>(arrays[static_cast<size_t>(i)].get());
            const auto expected = static_cast<float>(size * i + size * (size - 1) / 2);
            CHECK(std::all_of(values, values + 5000 + 30011 * i,
                              [&](float value) { return value == expected; }));
          }
        }
        const auto stats = driver.stats();
        CHECK_EQ(stats.at("data_messages_sent"), 0.0);
        CHECK_EQ(stats.at("works_in_flight"), 0.0);
      });
    }
  }
}

// Callers that poll themselves: together, late by more than they poll for, or one with a work.
void test_direct_now() {
  std::atomic<int> done_at_once = 0;
  for (const int size : {2, 3}) {
    const auto windows = check::connected_windows(size, 64 << 20);
    check::run_ranks(size, {}, {}, [&](Driver& driver) {
      const auto rank = static_cast<size_t>(driver.rank());
      driver.set_window(windows[rank], std::vector<int>(static_cast<size_t>(size), 0));
      for (int round = 0; round < 150; ++round) {
        const int64_t count = std::array{16385, 70001, 400000}[static_cast<size_t>(round % 3)];
        const bool is_shared = round % 4 != 0 || driver.rank() != round % size;
        const size_t bytes = 4 * static_cast<size_t>(count);
        const auto array = is_shared ? driver.allocate(bytes) : allocate(bytes);
        auto* const values = reinterpret_cast<float*>(array.get());
        std::fill_n(values, count, static_cast<float>(driver.rank() + round));
        if (round % 5 == 0 && driver.rank() == round % size) sleep_ns(kMillisecond);
        const bool is_now = round % 7 != 0 || driver.rank() != round % size;
        const Call call = allreduce_of(count);
        const auto work = is_now ? driver.allreduce_now(call, values) : driver.submit(call, values);
        if (work) driver.wait(work, kTimeout);
        done_at_once += static_cast<int>(!work);
        const auto expected = static_cast<float>(size * round + size * (size - 1) / 2);
        CHECK(std::all_of(values, values + count, [&](float v) { return v == expected; }));
      }
      const auto stats = driver.stats();
      CHECK_EQ(stats.at("data_messages_sent"), 0.0);
      CHECK_EQ(stats.at("works_in_flight"), 0.0);
      CHECK_EQ(stats.at("works"), 150.0);
    });
  }
  CHECK((done_at_once > 0) != check::is_set("RINGDL_TEST_EXECUTOR", "device"));
}

// Ranks that have arrived reduce nothing before the last one has, and then take its part as well.
void test_pieces_are_taken_over() {
  constexpr size_t kCount = 1 << 20;
  const auto windows = check::connected_windows(2, 16 << 20);
  std::vector<std::shared_ptr<std::byte>> arrays;
  SharedArrays shared;
  for (const auto& window : windows) {
    arrays.push_back(window->allocate(4 * kCount));
    std::fill_n(reinterpret_cast<float*>(arrays.back().get()), kCount, 1.0f);
    shared.arrays.push_back(arrays.back().get());
  }
  const auto memory = windows[0]->allocate(SharedCounters::bytes(2));
  std::memset(memory.get(), 0, SharedCounters::bytes(2));
  shared.counters = SharedCounters(memory.get(), 2);
  struct Silent final : Channel {
    int rank() const override { return 0; }
    int size() const override { return 2; }
    void send(int, const void*, size_t) override { CHECK(false); }
    void receive(int, void*, size_t) override { CHECK(false); }
    int64_t sent(int) const override { return 0; }
    int64_t received(int) const override { return 0; }
    bool agreed() const override { return true; }
  } channel;
  const ReduceMany reduce_many(DType::kFloat32, Reduction::kSum, 2);
  for (uint64_t instance = 0; instance < 3; ++instance) {
    DirectAllreduce first(cpu_executor(), shared, instance, 4 * kCount, reduce_many, 0);
    DirectAllreduce second(cpu_executor(), shared, instance, 4 * kCount, reduce_many, 1);
    CHECK(!first.step(channel));
    CHECK(!first.step(channel));
    CHECK_EQ(first.pieces(), 0);
    CHECK(!second.step(channel) || second.pieces() > 0);
    while (!first.step(channel)) continue;
    while (!second.step(channel)) continue;
    CHECK(first.pieces() > 0);
    CHECK(second.pieces() > 0);
    for (const auto& array : arrays) {
      const auto* values = reinterpret_cast<const float*>(array.get());
      const auto expected = static_cast<float>(2 << instance);
      CHECK(std::all_of(values, values + kCount, [&](float v) { return v == expected; }));
    }
  }
}

const std::vector<std::vector<int>> kLayouts = {{0, 0, 1, 1}, {0, 1, 0, 1},       {0, 0, 0, 1},
                                                {5, 2, 2},    {0, 1, 1, 2, 2, 2}, {0, 0, 1, 1, 2}};

// Arrays in shared memory everywhere, nowhere, or on some ranks; also several at once.
void test_hierarchical_works() {
  for (const auto& hosts : kLayouts) {
    const int size = static_cast<int>(hosts.size());
    const auto windows = check::connected_windows(hosts, 128 << 20);
    for (const int ordinary : {0, 1, 2}) {  // none, all, or every third
      EngineOptions options;
      options.segment_bytes = 64 << 10;
      check::run_ranks(size, options, {}, [&](Driver& driver) {
        const auto rank = static_cast<size_t>(driver.rank());
        driver.set_window(windows[rank], hosts);
        const bool is_shared = ordinary == 0 || (ordinary == 2 && driver.rank() % 3 != 0);
        std::vector<std::shared_ptr<std::byte>> arrays;
        std::vector<std::shared_ptr<Work>> works;
        const std::vector<int64_t> counts = {4097, 70001, 800001, 5000};
        for (const int64_t count : counts) {
          const size_t bytes = 4 * static_cast<size_t>(count);
          arrays.push_back(is_shared ? driver.allocate(bytes) : allocate(bytes));
          auto* const values = reinterpret_cast<float*>(arrays.back().get());
          for (int64_t i = 0; i < count; ++i) {
            values[i] = static_cast<float>(driver.rank() + i % 1000);
          }
          if (driver.rank() == static_cast<int>(count % size)) sleep_ns(kMillisecond);
          works.push_back(driver.submit(allreduce_of(count), values));
        }
        for (size_t n = counts.size(); n-- > 0;) {
          driver.wait(works[n], kTimeout);
          const auto* const values = reinterpret_cast<const float*>(arrays[n].get());
          int64_t wrong = 0;
          for (int64_t i = 0; i < counts[n]; ++i) {
            const auto sum = static_cast<float>(size * (size - 1) / 2 + size * (i % 1000));
            wrong += static_cast<int64_t>(values[i] != sum);
          }
          CHECK_EQ(wrong, 0);
        }
      });
    }
  }
}

// Every way of putting 2 to 6 ranks on hosts: sums over all, whatever the arrays' sizes.
void test_hierarchical_buckets() {
  const std::vector<GradientSpec> specs = {{"a", {3}, DType::kFloat32, {}},
                                           {"b", {70001}, DType::kFloat64, {}},
                                           {"c", {1500000}, DType::kFloat32, {}}};
  for (const auto& hosts : kLayouts) {
    const int size = static_cast<int>(hosts.size());
    const auto windows = check::connected_windows(hosts, 64 << 20);
    EngineOptions options;
    options.segment_bytes = 64 << 10;
    check::run_drivers(size, options, {}, [&](const std::shared_ptr<Driver>& driver) {
      const int rank = driver->rank();
      driver->set_window(windows[static_cast<size_t>(rank)], hosts);
      const auto buckets = check::make_buckets(driver, specs, plan_buckets(specs, 16 << 20, 5000));
      for (int round = 1; round <= 4; ++round) {
        for (int i = 0; i < 3; ++i) {
          const int64_t count = specs[static_cast<size_t>(i)].count();
          auto* const gradient = buckets->gradient(i);
          for (int64_t j = 0; j < count; ++j) {
            const int value = rank * round + static_cast<int>(j % 1000);
            if (i == 1) reinterpret_cast<double*>(gradient)[j] = value;
            if (i != 1) reinterpret_cast<float*>(gradient)[j] = static_cast<float>(value);
          }
          if (rank == round % size) sleep_ns(2 * kMillisecond);
          buckets->ready(i);
        }
        buckets->wait(kTimeout);
        int64_t wrong = 0;
        for (int i = 0; i < 3; ++i) {
          const int64_t count = specs[static_cast<size_t>(i)].count();
          const auto* const gradient = buckets->gradient(i);
          for (int64_t j = 0; j < count; ++j) {
            const double sum = round * size * (size - 1) / 2 + size * (j % 1000);
            const double value = i == 1 ? reinterpret_cast<const double*>(gradient)[j]
                                        : reinterpret_cast<const float*>(gradient)[j];
            wrong += static_cast<int64_t>(value != sum);
          }
        }
        CHECK_EQ(wrong, 0);
      }
    });
  }
}

void test_buckets_without_messages() {
  const std::vector<GradientSpec> specs = {{"a", {1000}, DType::kFloat32, {}},
                                           {"b", {70000}, DType::kFloat64, {}},
                                           {"c", {300000}, DType::kFloat32, {}}};
  for (const int size : {2, 4}) {
    const auto windows = check::connected_windows(size, 64 << 20);
    check::run_drivers(size, {}, {}, [&](const std::shared_ptr<Driver>& driver) {
      const int rank = driver->rank();
      driver->set_window(windows[static_cast<size_t>(rank)],
                         std::vector<int>(static_cast<size_t>(driver->size()), 0));
      const auto buckets = check::make_buckets(driver, specs, plan_buckets(specs, 1 << 20, 5000));
      const double sent = driver->stats().at("messages_sent");
      for (int round = 1; round <= 20; ++round) {
        std::fill_n(reinterpret_cast<float*>(buckets->gradient(0)), 1000, 1.0f * round);
        buckets->ready(0);
        if (rank == 1) {
          std::fill_n(reinterpret_cast<double*>(buckets->gradient(1)), 70000, 1.0 * round);
          buckets->ready(1);
        }
        const std::vector<bool> produced = buckets->wait(kTimeout);
        CHECK(produced == std::vector<bool>({true, true, false}));
        CHECK_EQ(reinterpret_cast<float*>(buckets->gradient(0))[999],
                 static_cast<float>(size * round));
        CHECK_EQ(reinterpret_cast<double*>(buckets->gradient(1))[69999], 1.0 * round);
        CHECK_EQ(reinterpret_cast<float*>(buckets->gradient(2))[299999], 0.0f);
      }
      CHECK_EQ(driver->stats().at("messages_sent"), sent);
    });
  }
}

}  // namespace

// What each of them needs is freed once all ranks have dropped it.
void test_buckets_made_anew() {
  const std::vector<GradientSpec> specs = {{"a", {1000}, DType::kFloat32, {}}};
  constexpr int kTimes = 200;
  const auto windows = check::connected_windows(2, 8 << 20);
  check::run_drivers(2, {}, {}, [&](const std::shared_ptr<Driver>& driver) {
    Window& window = *windows[static_cast<size_t>(driver->rank())];
    driver->set_window(windows[static_cast<size_t>(driver->rank())], {0, 0});
    const uint64_t before = *window.offset_of(window.allocate_stage(1).get(), 1);
    for (int number = 0; number < kTimes; ++number) {
      const auto buckets =
          check::make_buckets(driver, specs, plan_buckets(specs, 1 << 20, 5000), number);
      std::fill_n(reinterpret_cast<float*>(buckets->gradient(0)), 1000, 1.0f);
      buckets->ready(0);
      buckets->wait(kTimeout);
      CHECK_EQ(*reinterpret_cast<float*>(buckets->gradient(0)), 2.0f);
    }
    Call barrier;
    driver->wait(driver->submit(barrier, nullptr), kTimeout);
    const auto last = check::make_buckets(driver, specs, plan_buckets(specs, 1 << 20, 1), kTimes);
    const uint64_t after = *window.offset_of(window.allocate_stage(1).get(), 1);
    CHECK(after - before < 4096);
    CHECK_EQ(driver->stats().at("keys"), 2.0 + kTimes);
  });
}

// A rank that has used up its share has its buckets elsewhere, and all use the ring.
void test_buckets_without_room() {
  const std::vector<GradientSpec> specs = {{"a", {100}, DType::kFloat32, {}},
                                           {"b", {500000}, DType::kFloat32, {}}};
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 0, 1}, {0, 0, 1, 1}}) {
    const auto windows = check::connected_windows(hosts, 8 << 20);
    const int size = static_cast<int>(hosts.size());
    check::run_drivers(size, {}, {}, [&](const std::shared_ptr<Driver>& driver) {
      driver->set_window(windows[static_cast<size_t>(driver->rank())], hosts);
      const auto taken = driver->rank() == 1 ? driver->allocate(5 << 20) : nullptr;
      const auto buckets = check::make_buckets(driver, specs, plan_buckets(specs, 1 << 20, 400));
      for (int round = 1; round < 4; ++round) {
        for (int i = 0; i < 2; ++i) {
          std::fill_n(reinterpret_cast<float*>(buckets->gradient(i)),
                      specs[static_cast<size_t>(i)].count(), 1.0f * round);
          buckets->ready(i);
        }
        buckets->wait(kTimeout);
        CHECK_EQ(*reinterpret_cast<float*>(buckets->gradient(0)), 1.0f * round * size);
        CHECK_EQ(reinterpret_cast<float*>(buckets->gradient(1))[499999], 1.0f * round * size);
      }
      CHECK(driver->stats().at("data_messages_sent") > 0.0);
    });
  }
}

int main() {
  test_slots();
  test_slots_passed_over();
  test_direct_works();
  test_direct_now();
  test_pieces_are_taken_over();
  test_hierarchical_works();
  test_hierarchical_buckets();
  test_buckets_without_messages();
  test_buckets_made_anew();
  test_buckets_without_room();
  return check::report();
}

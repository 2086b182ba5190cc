// Random programs: mismatches, short timeouts, late ranks, works that nobody waits for, buckets,
// several threads and shutdowns at any moment. A failing seed runs by itself with
//   stress_test SEED 1

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "base/error.h"
#include "child.h"
#include "engine/driver.h"
#include "engine/gradient_buckets.h"
#include "ranks.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 20 * kSecond;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int below(int end) { return static_cast<int>(engine_() % static_cast<uint64_t>(end)); }
  bool one_in(int count) { return below(count) == 0; }
  uint64_t seed() { return engine_(); }
  void pause(int at_most_us) {
    std::this_thread::sleep_for(std::chrono::microseconds(below(at_most_us)));
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

 private:
  std::mt19937_64 engine_;
};

/// What all ranks do, except the one that disagrees.
struct Operation {
  Call call;
  int wrong_rank = -1;
  int field = 0;   // what that rank passes otherwise: shape, dtype, or kind
  int offset = 0;  // rank r contributes r + offset
};

using Operations = std::vector<Operation>;

struct Program {
  int size;
  int threads;
  EngineOptions options;
  LoopbackOptions loopback;
  bool shares_memory;
  bool has_buckets;
  bool is_typo_last;                            // the last rank ends with a name of its own
  int dropping_rank = -1;                       // drops its buckets in the middle of the last round
  std::vector<std::vector<Operations>> rounds;  // by round and thread
};

Operations random_operations(Random& random, int size, int thread) {
  constexpr int64_t kCounts[] = {0, 1, 7, 100, 517, 9000, 40000};
  Operations operations;
  const int count = 1 + random.below(10);
  for (int i = 0; i < count; ++i) {
    Operation operation;
    Call& call = operation.call;
    call.kind = static_cast<Kind>(random.below(4));
    call.dtype = DType::kFloat32;
    // Unnamed calls are matched by their order, which two threads do not have.
    if (thread > 0 || !random.one_in(3)) {
      call.name = std::to_string(thread) + "/" + std::to_string(i);
    }
    if (call.kind != Kind::kBarrier) {
      call.shape = {kCounts[random.below(7)]};
      if (random.one_in(6)) operation.wrong_rank = random.below(size);
    }
    if (call.kind == Kind::kAllgather) call.shape = {call.shape[0] % 100, 2};
    if (call.kind == Kind::kBroadcast) call.root = random.below(size);
    operation.field = random.below(call.name.empty() ? 2 : 3);
    operation.offset = i;
    operations.push_back(operation);
  }
  return operations;
}

Program random_program(uint64_t seed) {
  Random random(seed);
  Program program;
  program.size = 2 + random.below(3);
  program.threads = 1 + random.below(2);
  if (!random.one_in(3)) program.options.segment_bytes = size_t{64} << random.below(7);
  if (random.one_in(3)) program.options.inline_bytes = static_cast<size_t>(64 * random.below(4));
  program.loopback = {random.one_in(2) ? 512u : 4096u, random.one_in(3) ? 0 : seed + 1};
  program.shares_memory = random.one_in(2);
  program.has_buckets = random.one_in(2);
  program.is_typo_last = program.threads == 1 && random.one_in(6);
  if (program.has_buckets && random.one_in(3)) program.dropping_rank = random.below(program.size);
  for (int round = 0; round < 4; ++round) {
    std::vector<Operations>& threads = program.rounds.emplace_back();
    for (int thread = 0; thread < program.threads; ++thread) {
      threads.push_back(random_operations(random, program.size, thread));
    }
  }
  return program;
}

struct Started {
  Operation operation;
  std::shared_ptr<Work> work;
  float* data;
};

/// One rank's part of a program.
class Rank {
 public:
  Rank(const Program& program, std::shared_ptr<Driver> driver, std::shared_ptr<Window> window,
       uint64_t seed)
      : program_(program), driver_(std::move(driver)), window_(std::move(window)), random_(seed) {
    if (window_)
      driver_->set_window(window_, std::vector<int>(static_cast<size_t>(driver_->size()), 0));
    if (!program.has_buckets) return;
    for (int i = 0; i < 8; ++i) {
      specs_.push_back({"g" + std::to_string(i), {i * 97 % 200 + 1}, DType::kFloat32, {}});
    }
    buckets_ = check::make_buckets(driver_, specs_, plan_buckets(specs_, 700, 300));
  }

  void run() {
    for (const std::vector<Operations>& round : program_.rounds) {
      std::vector<std::thread> others;
      for (size_t thread = 1; thread < round.size(); ++thread) {
        others.emplace_back([&, thread, seed = random_.seed()] {
          try {
            run_operations(round[thread], Random(seed), nullptr);
          } catch (const std::exception& error) {
            check::record(false, __FILE__, __LINE__, error.what());
          }
        });
      }
      const bool is_last = &round == &program_.rounds.back();
      if (is_last && program_.dropping_rank >= 0) last_bucket_round();
      run_operations(round[0], Random(random_.seed()), buckets_.get());
      for (std::thread& thread : others) thread.join();
      let_go_of_ended();
    }
    if (program_.is_typo_last) typo();
    if (random_.one_in(2)) buckets_.reset();
    random_.pause(2000);
    driver_->shutdown();
    let_go_of_ended();
    CHECK(buffers_.empty());
  }

 private:
  /// @returns false if the work has failed
  template <class Wait>
  static bool wait_patiently(Random& random, const Wait& wait) {
    while (true) {
      const bool is_short = random.one_in(4);
      try {
        wait(is_short ? random.below(2000) * kMicrosecond : kTimeout);
        return true;
      } catch (const StallError&) {
        if (!is_short) throw;
      } catch (const MismatchError&) {
        return false;
      }
    }
  }

  void run_operations(const Operations& operations, Random random, GradientBuckets* buckets) {
    if (random.one_in(4)) random.pause(3000);
    if (buckets != nullptr) produce(*buckets, random);
    std::vector<Started> started;
    for (const size_t i : random_order(operations, random)) {
      started.push_back(start(operations[i], random.one_in(2)));
      if (random.one_in(10)) random.pause(500);
    }
    random.shuffle(started);
    for (const Started& one : started) {
      if (!one.work) {
        CHECK(one.operation.wrong_rank < 0);
        verify(one);
        continue;
      }
      if (random.one_in(8)) continue;  // nobody waits for it
      const bool is_well =
          wait_patiently(random, [&](int64_t timeout) { driver_->wait(one.work, timeout); });
      CHECK_EQ(is_well, one.operation.wrong_rank < 0);
      if (is_well) verify(one);
    }
    if (buckets == nullptr) return;
    CHECK(wait_patiently(random, [&](int64_t timeout) { buckets->wait(timeout); }));
    const float sum = *reinterpret_cast<float*>(buckets->gradient(0));
    CHECK_EQ(sum, static_cast<float>(program_.size));
  }

  /// Any order, except of unnamed calls of one kind.
  static std::vector<size_t> random_order(const Operations& operations, Random& random) {
    std::vector<size_t> order(operations.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    random.shuffle(order);
    std::vector<size_t> unnamed;
    for (const size_t i : order) {
      if (operations[i].call.name.empty()) unnamed.push_back(i);
    }
    std::sort(unnamed.begin(), unnamed.end());
    auto next = unnamed.begin();
    for (size_t& i : order) {
      if (operations[i].call.name.empty()) i = *next++;
    }
    return order;
  }

  /// @param is_now  whether an allreduce that fits meets in slots
  Started start(const Operation& operation, bool is_now = false) {
    Call call = operation.call;
    const int rank = driver_->rank();
    if (call.kind == Kind::kAllgather) call.shape[0] += rank;
    if (operation.wrong_rank == rank) {
      if (operation.field == 0) ++call.shape.back();
      if (operation.field == 1) call.dtype = DType::kInt32;
      if (operation.field == 2) {
        call.kind = call.kind == Kind::kAllgather ? Kind::kAllreduce : Kind::kAllgather;
        call.root = -1;
      }
    }
    int64_t count = 1;
    for (const int64_t extent : call.shape) count *= extent;
    std::shared_ptr<std::byte> buffer = memory_for(operation, 4 * static_cast<size_t>(count) + 4);
    auto* data = reinterpret_cast<float*>(buffer.get());
    std::fill_n(data, count, static_cast<float>(rank + operation.offset));
    const bool may_be_now = call.kind == Kind::kAllreduce && call.name.empty();
    const auto work =
        may_be_now && is_now ? driver_->allreduce_now(call, data) : driver_->submit(call, data);
    std::lock_guard guard(lock_);
    if (!work) {
      done_.push_back(std::move(buffer));
      return {operation, work, data};
    }
    buffers_.emplace(work->id, std::move(buffer));
    return {operation, work, data};
  }

  // Shared, except for some operations on some rank.
  std::shared_ptr<std::byte> memory_for(const Operation& operation, size_t bytes) const {
    const bool is_ordinary = operation.offset % 4 == 0 && driver_->rank() == operation.offset / 4;
    return window_ && !is_ordinary ? window_->allocate(bytes) : allocate(bytes);
  }

  void verify(const Started& one) const {
    const Operation& operation = one.operation;
    const int size = program_.size;
    const auto all_are = [](const float* values, int64_t count, int expected) {
      return std::all_of(values, values + count,
                         [&](float value) { return value == static_cast<float>(expected); });
    };
    switch (operation.call.kind) {
      case Kind::kAllreduce:
        CHECK(all_are(one.data, operation.call.shape[0],
                      size * operation.offset + size * (size - 1) / 2));
        break;
      case Kind::kBroadcast:
        CHECK(all_are(one.data, operation.call.shape[0], operation.call.root + operation.offset));
        break;
      case Kind::kAllgather: {
        auto* block = reinterpret_cast<const float*>(one.work->collective->gathered()->data.data());
        for (int rank = 0; rank < size; ++rank) {
          const int64_t count = 2 * (operation.call.shape[0] + rank);
          CHECK(all_are(block, count, rank + operation.offset));
          block += count;
        }
        break;
      }
      default:
        break;
    }
  }

  /// Gradient 0 is ready on all ranks, the others on some.
  void produce(GradientBuckets& buckets, Random& random) {
    for (int i = 0; i < static_cast<int>(specs_.size()); ++i) {
      if (i > 0 && random.one_in(4)) continue;
      auto* values = reinterpret_cast<float*>(buckets.gradient(i));
      std::fill_n(values, specs_[static_cast<size_t>(i)].count(), 1.0f);
      buckets.ready(i);
    }
  }

  // One rank launches all buckets and drops them: the others' round may end well or not.
  void last_bucket_round() {
    for (int i = 0; i < static_cast<int>(specs_.size()); ++i) {
      try {
        buckets_->ready(i);
      } catch (const MismatchError&) {
        break;
      }
    }
    if (driver_->rank() != program_.dropping_rank) {
      wait_patiently(random_, [&](int64_t timeout) { buckets_->wait(timeout); });
    }
    buckets_.reset();
  }

  // The barrier fails on ranks without the typo.
  void typo() {
    const bool is_mistaken = driver_->rank() == program_.size - 1;
    Operation operation;
    if (is_mistaken) operation.call = {Kind::kAllreduce, DType::kFloat32, {}, -1, {1}, "typo"};
    CHECK_THROWS(driver_->wait(start(operation).work, kTimeout), MismatchError, "typo");
    driver_->wait(start({}).work, kTimeout);
  }

  void let_go_of_ended() {
    for (const uint64_t id : driver_->take_ended()) buffers_.erase(id);
  }

  const Program& program_;
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<Window> window_;
  Random random_;
  std::vector<GradientSpec> specs_;
  std::unique_ptr<GradientBuckets> buckets_;
  std::mutex lock_;
  std::vector<std::shared_ptr<std::byte>> done_;                      // reduced at once
  std::unordered_map<uint64_t, std::shared_ptr<std::byte>> buffers_;  // by work, until released
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 40;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    check::in_child("seed " + std::to_string(seed), 40, [seed] {
      const Program program = random_program(seed);
      std::vector<std::shared_ptr<SegmentWindow>> windows(static_cast<size_t>(program.size));
      if (program.shares_memory) windows = check::connected_windows(program.size, 64 << 20);
      check::run_drivers(program.size, program.options, program.loopback,
                         [&](const std::shared_ptr<Driver>& driver) {
                           const auto rank = static_cast<size_t>(driver->rank());
                           Rank(program, driver, windows[rank], seed * 100 + rank).run();
                         });
    });
  }
  return check::report();
}

// Ranks that have joined: every kind of call of those that have not, on one host and on several,
// what cannot be answered, and that all ranks count alike afterwards.

#include <algorithm>
#include <limits>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "calls.h"
#include "ranks.h"

using namespace ringdl;

namespace {

constexpr int kStarts = 2;
constexpr int kRounds = 4;

// How many rounds a rank has something to do in; the last to join are never the same in a row.
int rounds_of(int rank, int size, int start) {
  return 1 + (rank + start) % std::min(size, kRounds);
}

// The ranks of a round, and what they do in it.
class Round {
 public:
  Round(Driver& driver, GradientBuckets& buckets, SharedGroup evens, int start, int round)
      : driver_(driver), buckets_(buckets), evens_(std::move(evens)), size_(driver.size()) {
    for (int rank = 0; rank < size_; ++rank) {
      if (rounds_of(rank, size_, start) > round) live_.push_back(rank);
    }
  }

  void run() {
    for (const int64_t count : {1, 700, 70'000}) {
      sums<double>(count, DType::kFloat64, "named");
      sums<float>(count, DType::kFloat32, "");
    }
    extremes();
    averages();
    at_once();
    gathers();
    exchanges();
    from_roots();
    check::barrier(driver_);
    gradients();
    if (evens_) group_sums();
  }

 private:
  bool is_live(int rank) const { return std::ranges::count(live_, rank) > 0; }
  double sum() const {
    double sum = 0;
    for (const int rank : live_) sum += rank + 1;
    return sum;
  }
  std::shared_ptr<Work> call(Call call, void* data) {
    auto work = driver_.submit(call, data);
    driver_.wait(work, check::kTimeout);
    return work;
  }

  template <class T>
  void sums(int64_t count, DType dtype, const std::string& name) {
    std::vector<T> data(static_cast<size_t>(count), static_cast<T>(driver_.rank() + 1));
    call({Kind::kAllreduce, dtype, Reduction::kSum, -1, {count}, name}, data.data());
    CHECK(std::ranges::all_of(data, [&](T x) { return x == static_cast<T>(sum()); }));
  }

  void extremes() {
    const auto own = static_cast<int8_t>(driver_.rank() - 3);
    std::vector<int8_t> least(50, own);
    call({Kind::kAllreduce, DType::kInt8, Reduction::kMin, -1, {50}, ""}, least.data());
    CHECK_EQ(int{least[49]}, live_.front() - 3);
    std::vector<double> most(50, own);
    call({Kind::kAllreduce, DType::kFloat64, Reduction::kMax, -1, {5, 10}, ""}, most.data());
    CHECK_EQ(most[49], live_.back() - 3);
    std::vector<int32_t> product(9000, own);
    call({Kind::kAllreduce, DType::kInt32, Reduction::kProduct, -1, {9000}, ""}, product.data());
    int32_t expected = 1;
    for (const int rank : live_) expected *= rank - 3;
    CHECK_EQ(product[8999], expected);
    uint8_t all = 1;
    call({Kind::kAllreduce, DType::kBool, Reduction::kAverage, -1, {1}, ""}, &all);
    CHECK_EQ(int{all}, 1);
    uint8_t any = 0;
    call({Kind::kAllreduce, DType::kBool, Reduction::kSum, -1, {1}, ""}, &any);
    CHECK_EQ(int{any}, 0);
  }

  // Over all ranks, not over those that take part; what is sent as 16 bits, too.
  void averages() {
    std::vector<float> data(5000, static_cast<float>((driver_.rank() + 1) * size_));
    Call average{Kind::kAllreduce, DType::kFloat32, Reduction::kAverage, -1, {5000}, "average"};
    average.compression = DType::kBFloat16;
    call(average, data.data());
    CHECK_EQ(data[4999], static_cast<float>(sum()));
  }

  void at_once() {
    for (const int64_t count : {1, 3000, 100'000}) {
      std::vector<float> data(static_cast<size_t>(count), static_cast<float>(driver_.rank() + 1));
      const Call now{Kind::kAllreduce, DType::kFloat32, Reduction::kSum, -1, {count}, ""};
      if (const auto work = driver_.allreduce_now(now, data.data())) {
        driver_.wait(work, check::kTimeout);
      }
      CHECK_EQ(data.back(), static_cast<float>(sum()));
    }
  }

  void expect_rows(const std::shared_ptr<Work>& work, int64_t row_bytes) {
    const Gathered& gathered = *work->collective->gathered();
    size_t at = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t rows = is_live(rank) ? rank % 2 + 1 : 0;
      const auto length = static_cast<size_t>(gathered.lengths[static_cast<size_t>(rank)]);
      CHECK_EQ(static_cast<int64_t>(length), rows * row_bytes);
      const std::byte* const block = gathered.data.data() + at;
      CHECK(std::all_of(block, block + length,
                        [rank](std::byte byte) { return byte == std::byte(rank); }));
      at += length;
    }
  }

  void gathers() {
    for (const int64_t columns : {3, 50'000}) {
      const int64_t rows = driver_.rank() % 2 + 1;
      std::vector<uint8_t> own(static_cast<size_t>(rows * columns),
                               static_cast<uint8_t>(driver_.rank()));
      expect_rows(call({Kind::kAllgather, DType::kUInt8, {}, -1, {rows, columns}, ""}, own.data()),
                  columns);
      const int root = live_.back();
      const auto gathered =
          call({Kind::kGather, DType::kUInt8, {}, root, {rows, columns}, "gather"}, own.data());
      if (driver_.rank() == root) expect_rows(gathered, columns);
    }
  }

  void exchanges() {
    for (const int64_t columns : {2, 40'000}) {
      std::vector<int32_t> rows(static_cast<size_t>(size_ * columns), driver_.rank());
      Call exchange{Kind::kAlltoall, DType::kInt32, {}, -1, {size_, columns}, ""};
      exchange.splits.assign(static_cast<size_t>(size_), 1);
      const auto work = call(exchange, rows.data());
      const auto& lengths = work->collective->gathered()->lengths;
      for (int rank = 0; rank < size_; ++rank) {
        CHECK_EQ(lengths[static_cast<size_t>(rank)], is_live(rank) ? 4 * columns : 0);
      }

      const int64_t own = (2 * size_ + 1) / size_ + (driver_.rank() < (2 * size_ + 1) % size_);
      std::vector<double> data(static_cast<size_t>((2 * size_ + 1) * columns), driver_.rank() + 1);
      std::vector<double> output(static_cast<size_t>(own * columns));
      Call reduce{Kind::kReduceScatter,     DType::kFloat64, Reduction::kSum, -1,
                  {2 * size_ + 1, columns}, "scattered"};
      reduce.output = output.data();
      call(reduce, data.data());
      CHECK(std::ranges::all_of(output, [&](double x) { return x == sum(); }));
    }
  }

  void from_roots() {
    const int root = live_.front();
    for (const int64_t count : {10, 60'000}) {
      std::vector<float> data(static_cast<size_t>(count), static_cast<float>(driver_.rank()));
      call({Kind::kBroadcast, DType::kFloat32, {}, root, {count}, ""}, data.data());
      CHECK_EQ(data.back(), static_cast<float>(root));
      std::vector<float> dealt(static_cast<size_t>(driver_.rank() == root ? count * size_ : 0), 7);
      Call scatter{Kind::kScatter, DType::kFloat32, {}, root, {0, count}, ""};
      if (driver_.rank() == root) {
        scatter.shape[0] = size_;
        scatter.splits.assign(static_cast<size_t>(size_), 1);
      }
      const auto work = call(scatter, dealt.data());
      CHECK_EQ(work->collective->gathered()->data.size(), static_cast<size_t>(4 * count));
    }
  }

  // The second one is missing everywhere.
  void gradients() {
    for (const int i : {2, 0}) {
      auto* const gradient = reinterpret_cast<float*>(buckets_.gradient(i));
      std::fill_n(gradient, buckets_.gradients()[static_cast<size_t>(i)].count(),
                  static_cast<float>(driver_.rank() + 1));
      buckets_.ready(i);
    }
    const std::vector<bool> produced = buckets_.wait(check::kTimeout);
    CHECK(produced[0] && !produced[1] && produced[2]);
    for (const int i : {2, 0}) {
      const auto* const gradient = reinterpret_cast<float*>(buckets_.gradient(i));
      const int64_t count = buckets_.gradients()[static_cast<size_t>(i)].count();
      CHECK(std::all_of(gradient, gradient + count,
                        [&](float x) { return x == static_cast<float>(sum()); }));
    }
  }

  void group_sums() {
    std::vector<float> data(9000, 1.0f);
    Call sum_of_evens = check::sum_of(9000, "evens");
    sum_of_evens.group = evens_;
    call(sum_of_evens, data.data());
    CHECK_EQ(data[0], static_cast<float>(
                          std::ranges::count_if(live_, [](int rank) { return rank % 2 == 0; })));
  }

  Driver& driver_;
  GradientBuckets& buckets_;
  const SharedGroup evens_;  // null on the others
  const int size_;
  std::vector<int> live_;
};

SharedGroup group_of_evens(Driver& driver) {
  if (driver.rank() % 2 != 0) return nullptr;
  std::vector<int> evens;
  for (int rank = 0; rank < driver.size(); rank += 2) evens.push_back(rank);
  SharedGroup group = group_of(std::move(evens), driver.rank(), driver.size(), 1);
  driver.know_group(group);
  return group;
}

void test_calls() {
  const std::vector<std::vector<int>> layouts = {
      {0}, {0, 0}, {0, 1}, {0, 0, 0}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 2}};
  const std::vector<GradientSpec> specs{{"a", {40'000}, DType::kFloat32, {}},
                                        {"b", {10}, DType::kFloat32, {}},
                                        {"c", {3}, DType::kFloat32, {}}};
  for (const auto& hosts : layouts) {
    const auto size = static_cast<int>(hosts.size());
    const auto windows = check::connected_windows(hosts, 64 << 20);
    for (const uint64_t delay_seed : {0u, 5u}) {
      if (delay_seed != 0 && size > 3) continue;
      const bool shares = delay_seed == 0;
      check::run_drivers(size, {}, {4096, delay_seed}, [&](const check::Shared& driver) {
        if (shares) driver->set_window(windows[static_cast<size_t>(driver->rank())], hosts);
        const auto buckets = check::make_buckets(driver, specs, plan_buckets(specs, 4096, 4096));
        const SharedGroup evens = group_of_evens(*driver);
        for (int start = 0; start < kStarts; ++start) {
          const int rounds = rounds_of(driver->rank(), size, start);
          for (int round = 0; round < rounds; ++round) {
            Round(*driver, *buckets, evens, start, round).run();
          }
          int last = 0;  // all rounds have as many works of all ranks
          const auto works = [&](int rank) { return rounds_of(rank, size, start); };
          for (int rank = 0; rank < size; ++rank) {
            if (works(rank) >= works(last)) last = rank;
          }
          const int came_last = driver->join(check::kTimeout);
          int32_t same = came_last;
          driver->wait(driver->submit(
                           {Kind::kAllreduce, DType::kInt32, Reduction::kMax, -1, {1}, ""}, &same),
                       check::kTimeout);
          CHECK_EQ(same, came_last);
          CHECK_EQ(came_last, last);
        }
      });
    }
  }
}

// Which rank joins last: most works, then the highest rank.
void test_last() {
  check::run_ranks(4, {}, {}, [](Driver& driver) {
    const std::vector<int> works = {1, 3, 3, 2};
    for (int i = 0; i < works[static_cast<size_t>(driver.rank())]; ++i) {
      float x = 1;
      driver.wait(driver.submit(check::sum_of(1, "x"), &x), check::kTimeout);
    }
    CHECK_EQ(driver.join(check::kTimeout), 2);
    CHECK_EQ(driver.join(check::kTimeout), 3);
  });
}

// Works in flight when a rank joins still end, though it waits for them only afterwards.
void test_in_flight() {
  check::run_drivers(3, {}, {4096, 2}, [](const check::Shared& driver) {
    const auto buckets = check::one_bucket(driver, 5000);
    std::vector<float> data(30'000, 1.0f);
    std::shared_ptr<Work> work;
    if (driver->rank() > 0) {
      check::pause_ms(20);
      work = driver->submit(check::sum_of(30'000, "late"), data.data());
      auto* const gradient = reinterpret_cast<float*>(buckets->gradient(0));
      std::fill_n(gradient, 5000, 1.0f);
      buckets->ready(0);
    }
    driver->join(check::kTimeout);
    if (work) {
      CHECK(work->ended());
      driver->wait(work, check::kTimeout);
      CHECK_EQ(data[29'999], 2.0f);
      CHECK(buckets->wait(check::kTimeout)[0]);
      CHECK_EQ(*reinterpret_cast<float*>(buckets->gradient(0)), 2.0f);
    }
  });
}

void add(void* into, const void* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    static_cast<float*>(into)[i] += static_cast<const float*>(from)[i];
  }
}

void test_refusals() {
  check::run_ranks(3, {}, {4096, 1}, [](Driver& driver) {
    constexpr int kAway = 1;
    std::vector<float> data(5000, 1.0f);
    const auto refuses = [&](const Call& call, const std::string& words) {
      CHECK_THROWS(driver.wait(driver.submit(call, data.data()), check::kTimeout), UsageError,
                   words);
    };
    if (driver.rank() != kAway) {
      check::pause_ms(200);
      for (const Kind kind : {Kind::kBroadcast, Kind::kGather}) {
        refuses({kind, DType::kFloat32, {}, kAway, {5000}, ""}, "cannot be the root of");
      }
      refuses({Kind::kScatter, DType::kFloat32, {}, kAway, {0, 1}, "s"}, "cannot be the root of");
      Call own = check::sum_of(5000, "own");
      own.operation = {&add, 7, "add"};
      refuses(own, "nothing neutral for allreduce 'own'");
      Call message{Kind::kMessage, DType::kFloat32, {}, -1, {5000}, "m"};
      if (driver.rank() == 0) {
        message.group = group_of_pair(0, kAway, *driver.group_of_all_ranks());
        refuses(message, "neither sends nor receives");
      }
      driver.wait(driver.submit(check::sum_of(5000, "after"), data.data()), check::kTimeout);
    } else {
      CHECK_THROWS(driver.join(kSecond / 100), StallError, "waits on rank 1 for");
      CHECK_THROWS(driver.submit(check::sum_of(5, ""), data.data()), UsageError, "called join()");
    }
    driver.join(check::kTimeout);
  });
}

void test_leaving() {
  check::run_ranks(3, {}, {}, [](Driver& driver) {
    if (driver.rank() == 2) return;  // shuts down
    CHECK_THROWS(driver.join(check::kTimeout), MismatchError, "rank 2 has shut down");
  });
}

}  // namespace

int main() {
  test_calls();
  test_last();
  test_in_flight();
  test_refusals();
  test_leaving();
  return check::report();
}

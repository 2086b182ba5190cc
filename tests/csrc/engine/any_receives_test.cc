// Receives that name no rank: each message once, in its sender's order, no sender passed over; and
// what they say when none arrives.

#include <string>
#include <vector>

#include "base/error.h"
#include "calls.h"
#include "ranks.h"

using namespace ringdl;
using check::barrier;
using check::kTimeout;
using check::pause_ms;

namespace {

constexpr int kMessages = 20;

Call message(int64_t count, const std::string& name) {
  return {Kind::kMessage, DType::kInt32, Reduction::kSum, -1, {count}, name};
}

Call from_any(int64_t count, const std::string& name) {
  Call call = message(count, name);
  call.from_any = true;
  return call;
}

Call between(Driver& driver, int from, int to, int64_t count, const std::string& name) {
  Call call = message(count, name);
  call.group = group_of_pair(from, to, *driver.group_of_all_ranks());
  return call;
}

std::vector<int32_t> content(int rank, int number, int64_t count) {
  return std::vector<int32_t>(static_cast<size_t>(count), 100 * rank + number);
}

template <class Error, class Act>
std::string error_of(const Act& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void send_all(Driver& driver, int64_t count, const std::string& name) {
  std::vector<std::vector<int32_t>> arrays;
  std::vector<std::shared_ptr<Work>> works;
  for (int number = 0; number < kMessages; ++number) {
    arrays.push_back(content(driver.rank(), number, count));
    const Call call = between(driver, driver.rank(), 0, count, name);
    works.push_back(driver.submit(call, arrays.back().data()));
  }
  for (const auto& work : works) driver.wait(work, kTimeout);
}

// Receives posted before and after their messages have arrived, small messages and granted ones.
void test_all_are_received_in_order(int size, uint64_t delay_seed, int64_t count) {
  check::run_ranks(size, {}, {4096, delay_seed}, [&](Driver& driver) {
    for (const std::string name : {"", "tag"}) {
      if (driver.rank() != 0) {
        send_all(driver, count, name);
        continue;
      }
      const int total = kMessages * (size - 1);
      std::vector<std::vector<int32_t>> arrays(static_cast<size_t>(total));
      std::vector<std::shared_ptr<Work>> works;
      for (int i = 0; i < total; ++i) {
        if (i == total / 2) pause_ms(5);
        auto& array = arrays[static_cast<size_t>(i)];
        array.resize(static_cast<size_t>(count));
        works.push_back(driver.submit(from_any(count, name), array.data()));
      }
      std::vector<int> seen(static_cast<size_t>(size));
      for (size_t i = 0; i < works.size(); ++i) {
        driver.wait(works[i], kTimeout);
        const int sender = works[i]->sender.load();
        CHECK(sender > 0 && sender < size);
        CHECK(arrays[i] == content(sender, seen[static_cast<size_t>(sender)]++, count));
      }
      for (int rank = 1; rank < size; ++rank) CHECK_EQ(seen[static_cast<size_t>(rank)], kMessages);
    }
  });
}

// All have sent before anything is received: no rank is served twice before all were served once.
void test_ranks_are_served_in_turn() {
  constexpr int size = 4;
  check::run_ranks(size, {}, {4096, 0}, [&](Driver& driver) {
    std::vector<std::vector<int32_t>> arrays;
    std::vector<std::shared_ptr<Work>> works;
    if (driver.rank() != 0) {
      for (int number = 0; number < 3; ++number) {
        arrays.push_back(content(driver.rank(), number, 1));
        works.push_back(driver.submit(between(driver, driver.rank(), 0, 1, ""), &arrays.back()[0]));
      }
    }
    barrier(driver);  // what was sent before has arrived with it, or a poll later
    pause_ms(20);
    if (driver.rank() == 0) {
      driver.poll();
      for (int round = 0; round < 3; ++round) {
        std::vector<bool> came(size);
        for (int i = 1; i < size; ++i) {
          int32_t value = -1;
          const auto work = driver.submit(from_any(1, ""), &value);
          driver.wait(work, kTimeout);
          CHECK_EQ(value, 100 * work->sender.load() + round);
          came[static_cast<size_t>(work->sender.load())] = true;
        }
        CHECK(came == std::vector<bool>({false, true, true, true}));
      }
    }
    for (const auto& work : works) driver.wait(work, kTimeout);
  });
}

// A receive that names its rank, and one that does not, of the same messages.
void test_beside_receives_that_name_a_rank() {
  check::run_ranks(3, {}, {4096, 1}, [](Driver& driver) {
    if (driver.rank() == 0) {
      int32_t any = -1;
      int32_t named = -1;
      const auto waiting = driver.submit(from_any(1, "x"), &any);
      const auto claiming = driver.submit(between(driver, 2, 0, 1, "x"), &named);
      barrier(driver);
      driver.wait(claiming, kTimeout);
      CHECK_EQ(named, 200);
      driver.wait(waiting, kTimeout);
      CHECK_EQ(any, waiting->sender.load() == 1 ? 100 : 201);
      int32_t last = -1;
      const auto rest = driver.submit(from_any(1, "x"), &last);
      driver.wait(rest, kTimeout);
      CHECK(rest->sender.load() != waiting->sender.load());
      return;
    }
    barrier(driver);
    for (int number = 0; number < driver.rank(); ++number) {
      int32_t value = 100 * driver.rank() + number;
      driver.wait(driver.submit(between(driver, driver.rank(), 0, 1, "x"), &value), kTimeout);
    }
  });
}

void test_errors() {
  check::run_ranks(3, {}, {4096, 2}, [](Driver& driver) {
    int32_t values[4] = {};
    if (driver.rank() == 0) {
      const auto work = driver.submit(from_any(2, "late"), values);
      const std::string late = error_of<StallError>([&] { driver.wait(work, 200 * kMillisecond); });
      CHECK(late.find("message 'late' from any rank to rank 0 did not end") != std::string::npos);
      barrier(driver);
      driver.wait(work, kTimeout);  // it goes on
      CHECK_EQ(work->sender.load(), 2);
      const std::string differs = error_of<MismatchError>(
          [&] { driver.wait(driver.submit(from_any(3, "long"), values), kTimeout); });
      CHECK(differs.find("shape (4,) on rank 1 and (3,) on rank 0") != std::string::npos);
      const std::string nobody = error_of<MismatchError>(
          [&] { driver.wait(driver.submit(from_any(1, "never"), values), kTimeout); });
      CHECK(nobody.find("all other ranks have shut down without sending message 'never'") !=
            std::string::npos);
      return;
    }
    barrier(driver);
    if (driver.rank() == 2) {
      driver.wait(driver.submit(between(driver, 2, 0, 2, "late"), values), kTimeout);
      return;
    }
    const std::string differs = error_of<MismatchError>(
        [&] { driver.wait(driver.submit(between(driver, 1, 0, 4, "long"), values), kTimeout); });
    CHECK(differs.find("disagree") != std::string::npos);
  });
}

// Ranks 1 and 2 wait for rank 0, which waits for either: no timeout is needed to find that.
void test_a_deadlock_is_found() {
  check::run_ranks(3, {}, {4096, 3}, [](Driver& driver) {
    int32_t value = 0;
    const std::string why = error_of<MismatchError>([&] {
      driver.wait(driver.submit(driver.rank() == 0 ? from_any(1, "x") : Call{}, &value), kTimeout);
    });
    CHECK(why.find("ranks wait for one another") != std::string::npos);
  });
}

// wait_any() ends with the first of several, on a notification, and when the time of one is over.
void test_waiting_for_any_of_several() {
  check::run_ranks(2, {}, {4096, 4}, [](Driver& driver) {
    float first = 1;
    float second = 1;
    if (driver.rank() == 0) {
      const auto later = driver.submit(check::sum_of(1, "first"), &first);
      const auto soon = driver.submit(check::sum_of(1, "second"), &second);
      const auto begin = now_ns();
      CHECK(!driver.wait_any({{later, begin, kTimeout}, {soon, begin, kTimeout}},
                             driver.notifications()));
      CHECK(soon->ended());
      CHECK(!later->ended());
      const uint64_t seen = driver.notifications();
      driver.notify();
      CHECK(!driver.wait_any({{later, begin, kTimeout}}, seen));
      CHECK(!later->ended());
      barrier(driver);
      driver.wait(later, kTimeout);
    } else {
      driver.wait(driver.submit(check::sum_of(1, "second"), &second), kTimeout);
      barrier(driver);
      driver.wait(driver.submit(check::sum_of(1, "first"), &first), kTimeout);
    }
    barrier(driver);
    if (driver.rank() == 0) {
      const auto late = driver.submit(check::sum_of(0, "late"), nullptr);
      const auto later = driver.submit(check::sum_of(0, "later"), nullptr);
      const auto begin = now_ns();
      const auto stalled = driver.wait_any(
          {{later, begin, kTimeout}, {late, begin, 100 * kMillisecond}}, driver.notifications());
      CHECK(stalled && stalled->index == 1);
      CHECK(stalled->why.find("'late' did not end within 0.1 s") != std::string::npos);
      barrier(driver);
      driver.wait(late, kTimeout);
      driver.wait(later, kTimeout);
    } else {
      barrier(driver);
      driver.wait(driver.submit(check::sum_of(0, "late"), nullptr), kTimeout);
      driver.wait(driver.submit(check::sum_of(0, "later"), nullptr), kTimeout);
    }
  });
}

// A send that its rank cannot make is told to a receive that was posted before, too.
void test_a_refused_send() {
  check::run_ranks(2, {}, {}, [](Driver& driver) {
    int32_t x = 0;
    if (driver.rank() == 0) {
      const auto work = driver.submit(from_any(1, "m"), &x);
      barrier(driver);
      const std::string text = error_of<MismatchError>([&] { driver.wait(work, kTimeout); });
      CHECK(text.find("it is no array") != std::string::npos);
      barrier(driver);
    } else {
      barrier(driver);
      pause_ms(100);
      driver.refuse(between(driver, 1, 0, 1, "m"), "it is no array");
      barrier(driver);
    }
  });
}

}  // namespace

int main() {
  for (const uint64_t delay_seed : {0u, 5u}) {
    for (const int size : {2, 3, 5}) {
      for (const int64_t count : {1, 5000}) test_all_are_received_in_order(size, delay_seed, count);
    }
  }
  test_ranks_are_served_in_turn();
  test_beside_receives_that_name_a_rank();
  test_errors();
  test_a_refused_send();
  test_a_deadlock_is_found();
  test_waiting_for_any_of_several();
  return check::report();
}

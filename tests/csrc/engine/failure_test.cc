// What becomes of a rank when something fails elsewhere. Each case runs in a process of its own:
// some of what it guards against is a crash or a hang.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "calls.h"
#include "child.h"
#include "engine/wire.h"
#include "hooked.h"
#include "ranks.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

// A rank that launched a bucket after another had dropped it waited for its whole timeout.
void bucket_dropped_before_launch() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    const auto buckets = one_bucket(driver, 100);
    barrier(*driver);
    if (driver->rank() == 0) {
      buckets->ready(0);
    } else {
      pause_ms(300);
      CHECK_THROWS(buckets->wait(3 * kSecond), MismatchError, "dropped on rank 0");
    }
  });
}

// The drop of a bucket was forgotten by a rank that had not made it yet.
void bucket_dropped_before_made() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    if (driver->rank() == 1) pause_ms(300);
    const auto buckets = one_bucket(driver, 100);
    if (driver->rank() == 0) {
      buckets->ready(0);
    } else {
      CHECK_THROWS(buckets->wait(3 * kSecond), MismatchError, "dropped on rank 0");
    }
  });
}

// A bucket that failed before a rank launched it left that rank two rounds ahead: its next round
// hung.
void bucket_round_too_many() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    const auto buckets = one_bucket(driver, 100);
    buckets->ready(0);
    buckets->wait(kTimeout);
    if (driver->rank() == 0) {
      buckets->ready(0);
      CHECK_THROWS(buckets->wait(kTimeout), MismatchError, "gradient bucket 0");
    } else {
      CHECK_THROWS(barrier(*driver), MismatchError, "gradient bucket 0");
    }
    CHECK_THROWS(buckets->wait(3 * kSecond), MismatchError, "");
    barrier(*driver);
  });
}

// The messages of a bucket that nobody will receive kept the progress thread awake for ever.
void lost_bucket_lets_the_thread_sleep() {
  run_drivers(2, {}, {512, 0}, [](const Shared& driver) {
    const auto buckets = one_bucket(driver, 100000);
    barrier(*driver);
    if (driver->rank() == 1) return;
    buckets->ready(0);
    CHECK_THROWS(buckets->wait(kTimeout), MismatchError, "rank 1 has shut down");
    pause_ms(100);
    const double before = driver->stats()["polls"];
    pause_ms(1000);
    CHECK(driver->stats()["polls"] - before < 150);
  });
}

// A failed call skipped the calls before it on ranks that had not made them yet, and the ranks'
// numbers were out of step for ever.
void failed_call_spares_those_before() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    std::vector<float> data(4, 1.0f);
    std::vector<std::shared_ptr<Work>> works;
    if (driver->rank() == 1) CHECK_THROWS(barrier(*driver), MismatchError, "3rd unnamed allreduce");
    for (int i = 0; i < 3; ++i) works.push_back(driver->submit(sum_of(1, ""), &data[i]));
    CHECK_THROWS(driver->wait(works[2], kTimeout), MismatchError, "3rd unnamed allreduce");
    driver->wait(works[0], 3 * kSecond);
    driver->wait(works[1], 3 * kSecond);
    driver->wait(driver->submit(sum_of(1, ""), &data[3]), 3 * kSecond);
    CHECK_EQ(data[0] + data[1] + data[3], 6.0f);
    barrier(*driver);
    CHECK_EQ(driver->stats()["parked_keys"], 0.0);
  });
}

// The list of ended works grew with every bucket launched, though nobody asks for those.
void buckets_leave_no_ids() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    const auto buckets = one_bucket(driver, 100);
    for (int round = 0; round < 20; ++round) {
      buckets->ready(0);
      buckets->wait(kTimeout);
    }
    CHECK_EQ(driver->take_ended().size(), 0u);
  });
}

// Ranks counted as blocked when one thread of each waited, though another computed and would have
// made the missing call.
void computing_thread_is_late_only() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    const std::string own = driver->rank() == 0 ? "a" : "b";
    const std::string others = driver->rank() == 0 ? "b" : "a";
    std::atomic<bool> computes = false;
    float x = 1;
    float y = 1;
    float z = 1;
    std::thread other([&] {
      driver->wait(driver->submit(sum_of(1, "first"), &z), kTimeout);
      computes = true;
      pause_ms(2000);
      driver->wait(driver->submit(sum_of(1, others), &y), kTimeout);
    });
    until([&] { return computes.load(); });
    const auto work = driver->submit(sum_of(1, own), &x);
    try {
      driver->wait(work, kTimeout);
    } catch (const MismatchError& error) {
      record(false, __FILE__, __LINE__, error.what());
      std::_Exit(1);  // the other thread fails as well
    }
    other.join();
    CHECK_EQ(x + y + z, 6.0f);
  });
}

// A wait that would give up counted as blocked, and both ranks failed as waiting for one another,
// though one would have gone on to what the other waited for.
void wait_that_gives_up_is_late_only() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    float x = 1;
    float y = 1;
    if (driver->rank() == 0) {
      const auto work = driver->submit(sum_of(1, "x"), &x);
      CHECK_THROWS(driver->wait(work, 4 * kSecond, {}, false), StallError,
                   "rank 1 has not arrived");
      driver->wait(driver->submit(sum_of(1, "y"), &y), kTimeout);
      driver->wait(work, kTimeout);
    } else {
      driver->wait(driver->submit(sum_of(1, "y"), &y), kTimeout);
      driver->wait(driver->submit(sum_of(1, "x"), &x), kTimeout);
    }
    CHECK_EQ(x + y, 4.0f);
  });
}

// A wait too short for any answer accused the other ranks of having stopped.
void short_wait_accuses_nobody() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    barrier(*driver);
    float x = 1;
    if (driver->rank() == 0) {
      const auto work = driver->submit(sum_of(1, "a"), &x);
      CHECK_THROWS(driver->wait(work, 0), StallError, "rank 1 did not answer in so short a time");
      driver->wait(work, kTimeout);
    } else {
      pause_ms(300);
      driver->wait(driver->submit(sum_of(1, "a"), &x), kTimeout);
    }
    CHECK_EQ(x, 2.0f);
  });
}

// Chunks of a long and a short segment: receives were withdrawn in order, so that a long message on
// its way met the receive of the short one, and the transport broke. Here rank 0 sends in the very
// middle of rank 1's withdrawals.
void messages_during_withdrawal() {
  EngineOptions options;
  options.segment_bytes = 4096;
  std::atomic<bool> may_poll = true;
  std::atomic<bool> is_granted = false;
  std::atomic<int> sent = 0;
  const auto wrap = [&](std::unique_ptr<Transport> below) -> std::unique_ptr<Transport> {
    Hooks hooks;
    if (below->rank() == 0) {
      hooks.may_poll = [&] { return may_poll.load(); };
      hooks.sent = [&](int, int tag) { sent += tag != 0; };
    }
    if (below->rank() == 1) {
      hooks.withdrawn = [&] {
        if (!may_poll.exchange(true)) until([&] { return sent > 0; });
      };
    }
    return std::make_unique<Hooked>(std::move(below), std::move(hooks));
  };
  run_drivers(
      3, options, {},
      [&](const Shared& driver) {
        std::vector<float> data(3 * (4096 + 3072) / sizeof(float), 1.0f);
        Call call = sum_of(static_cast<int64_t>(data.size()), "k");
        if (driver->rank() == 0) may_poll = false;
        if (driver->rank() == 2) {
          call.reduction = Reduction::kMax;
          until([&] { return is_granted.load(); });
        }
        const auto work = driver->submit(call, data.data());
        if (driver->rank() == 1) {
          until([&] { return driver->stats()["grants_sent"] > 0; });
          is_granted = true;
        }
        CHECK_THROWS(driver->wait(work, kTimeout), MismatchError, "reduction");
        barrier(*driver);
        CHECK(sent > 0);
      },
      wrap);
}

// Likewise for a bucket that one rank gives up while the other launches it.
void launch_during_withdrawal() {
  EngineOptions options;
  options.segment_bytes = 4096;
  std::atomic<bool> is_withdrawing = false;
  std::atomic<int> sent = 0;
  const auto wrap = [&](std::unique_ptr<Transport> below) -> std::unique_ptr<Transport> {
    Hooks hooks;
    if (below->rank() == 0) hooks.sent = [&](int, int tag) { sent += tag != 0; };
    if (below->rank() == 1) {
      hooks.withdrawn = [&] {
        if (!is_withdrawing.exchange(true)) until([&] { return sent > 0; });
      };
    }
    return std::make_unique<Hooked>(std::move(below), std::move(hooks));
  };
  run_drivers(
      2, options, {},
      [&](const Shared& driver) {
        auto buckets = one_bucket(driver, 2 * (4096 + 3072) / sizeof(float));
        barrier(*driver);
        if (driver->rank() == 1) {
          buckets.reset();
          CHECK(sent > 0);
        } else {
          until([&] { return is_withdrawing.load(); });
          CHECK_EQ(sent.load(), 0);
          buckets->ready(0);
          CHECK_THROWS(buckets->wait(kTimeout), MismatchError, "rank 1 has shut down");
        }
      },
      wrap);
}

/// Whether no character of `text`, ASCII and two-byte ones, is cut.
bool is_whole(const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) continue;
    if ((byte & 0xe0) != 0xc0 || i + 1 == text.size()) return false;
    if ((static_cast<unsigned char>(text[++i]) & 0xc0) != 0x80) return false;
  }
  return true;
}

// Long names were cut within a character: Python could then read neither the label nor the error.
void long_names_are_cut_between_characters() {
  CHECK_EQ(cut_to_fit("a\xc3\xa9", 3), "a\xc3\xa9");
  CHECK_EQ(cut_to_fit("a\xc3\xa9", 2), "a");
  CHECK_EQ(cut_to_fit("\xe2\x82\xac", 2), "");
  CHECK_EQ(cut_to_fit("", 0), "");
  for (const char* begin : {"", "x"}) {
    std::string name = begin;
    for (int i = 0; i < 60; ++i) name += "\xc3\xa9";
    run_drivers(2, {}, {}, [&](const Shared& driver) {
      float data[2] = {1, 1};
      const auto work = driver->submit(sum_of(1 + driver->rank(), name), data);
      CHECK(is_whole(work->label()));
      CHECK(work->label().size() > 90);
      CHECK_THROWS(driver->wait(work, kTimeout), MismatchError, "shape");
      CHECK(is_whole(work->failure.text));
    });
  }
}

// A buffer that its owner takes back while the work is in flight: nobody touches it any more. Large
// enough to be half-way when that happens, unless rank 0 gets no core in between: then it has ended
// on all ranks, and is submitted again.
void work_is_given_up() {
  run_drivers(3, {.segment_bytes = 1 << 10}, {.delay_seed = 1}, [](const Shared& driver) {
    constexpr int kCount = 100'000;
    int half_way = 0;
    for (int turn = 0; turn < 20 && half_way == 0; ++turn) {
      const bool is_late = turn == 0;
      std::vector<float> data(kCount, 1);
      if (driver->rank() == 1 && is_late) pause_ms(300);
      const auto work = driver->submit(sum_of(kCount, "given up"), data.data());
      if (driver->rank() == 0) {
        driver->give_up(work, "it has no time");
        CHECK(work->released.load());
        std::vector<float>(kCount, 2).swap(data);
        pause_ms(500);
        CHECK(data == std::vector<float>(kCount, 2));
      }
      int64_t failed = 1;
      try {
        driver->wait(work, kTimeout);
        failed = 0;
      } catch (const MismatchError& error) {
        CHECK(std::string(error.what()).ends_with("was given up on rank 0: it has no time"));
      }
      for (const auto& its : check::exchange(*driver, {failed})) CHECK_EQ(its[0], failed);
      if (is_late) CHECK_EQ(failed, 1);
      if (!is_late) half_way += static_cast<int>(failed);
    }
    CHECK_EQ(half_way, 1);
    float one = 1;
    driver->wait(driver->submit(sum_of(1, "after"), &one), kTimeout);
    CHECK_EQ(one, 3.0f);
  });
}

// A call that one rank has no room for hit whatever was waited for, and shutdown() hung.
void gather_without_room_fails_alone() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    std::byte none{};  // what is gathered is not read, as the root asks nobody
    float x = 1;
    const Call huge{Kind::kGather, DType::kUInt8, Reduction::kSum, 0, {int64_t{1} << 46}, "huge"};
    const auto work = driver->submit(huge, &none);
    const auto beside = driver->submit(sum_of(1, "beside"), &x);
    driver->wait(beside, kTimeout);
    CHECK_EQ(x, 2.0f);
    CHECK_THROWS(driver->wait(work, kTimeout), std::bad_alloc, "'huge' failed on rank 0: ");
    barrier(*driver);
  });
}

// A thread of a framework's, for which the caller waits, counted as one more that may submit, and
// ranks that waited for one another were not found.
void framework_thread_submits_for_its_caller() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    float x = 1;
    float y = 1;
    driver->wait(driver->submit(sum_of(1, "first"), &x), kTimeout);
    std::thread other([&] {
      CHECK(!Driver::submit_for_caller(true));
      const auto work = driver->submit(sum_of(1, driver->rank() == 0 ? "a" : "b"), &y);
      CHECK_THROWS(driver->wait(work, kTimeout), MismatchError, "");
    });
    other.join();
  });
}

// Buckets that had failed with a rank stayed until the process ended, with all memory that ranks
// share: of each recovery once more.
void failed_memory_goes_with_the_engine() {
  auto sockets = connected_sockets(2);
  auto windows = connected_windows(2, 8 << 20);
  const std::vector<Segment::Address> addresses{windows[0]->address(), windows[1]->address()};
  std::atomic<bool> waits = false;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto number = static_cast<size_t>(rank);
      const Shared driver = make_driver(make_tcp_transport(rank, std::move(sockets[number])), {});
      driver->set_window(std::exchange(windows[number], nullptr), {0, 0});
      auto buckets = one_bucket(driver, 100'000);
      barrier(*driver);
      if (rank == 1) {
        until([&] { return waits.load(); });
        pause_ms(100);
      } else {
        buckets->ready(0);
        std::vector<float> data(100, 1.0f);
        const auto small = driver->allreduce_now(sum_of(100, ""), data.data(), [] {});
        waits = true;
        CHECK_THROWS(buckets->wait(kTimeout), RankFailedError, "rank 1");
        CHECK_THROWS(driver->wait(small, kTimeout), RankFailedError, "rank 1");
        CHECK(small->is_kept.load() && !small->released.load());
        const int64_t begin = now_ns();
        driver->give_up(small, "it has failed");
        CHECK(now_ns() - begin < kSecond / 2);
        driver->abandon();
        CHECK(small->released.load() && !small->collective);
      }
      driver->abandon();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Segment::Address& address : addresses) CHECK(Segment::open(address) == nullptr);
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> cases[] = {
      {"bucket_dropped_before_launch", bucket_dropped_before_launch},
      {"bucket_dropped_before_made", bucket_dropped_before_made},
      {"bucket_round_too_many", bucket_round_too_many},
      {"lost_bucket_lets_the_thread_sleep", lost_bucket_lets_the_thread_sleep},
      {"failed_call_spares_those_before", failed_call_spares_those_before},
      {"buckets_leave_no_ids", buckets_leave_no_ids},
      {"computing_thread_is_late_only", computing_thread_is_late_only},
      {"wait_that_gives_up_is_late_only", wait_that_gives_up_is_late_only},
      {"short_wait_accuses_nobody", short_wait_accuses_nobody},
      {"messages_during_withdrawal", messages_during_withdrawal},
      {"launch_during_withdrawal", launch_during_withdrawal},
      {"work_is_given_up", work_is_given_up},
      {"long_names_are_cut_between_characters", long_names_are_cut_between_characters},
      {"gather_without_room_fails_alone", gather_without_room_fails_alone},
      {"framework_thread_submits_for_its_caller", framework_thread_submits_for_its_caller},
      {"failed_memory_goes_with_the_engine", failed_memory_goes_with_the_engine},
  };
  for (const auto& [name, body] : cases) in_child(name, 20, body);
  return report();
}

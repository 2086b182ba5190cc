// Shutting down: from several threads, interrupted, with failed works, and not at all in a fork.
// Each case runs in a process of its own: much of what it guards against is a crash or a hang.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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
#include "hooked.h"
#include "ranks.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

// shutdown() returned while a failed work was still sending from its caller's buffer.
void failed_works_leave_before_shutdown() {
  EngineOptions options;
  options.segment_bytes = 4096;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    run_drivers(3, options, {512, seed}, [](const Shared& driver) {
      std::vector<float> data(100000, 1.0f);
      const int64_t count = driver->rank() == 2 ? 99999 : 100000;
      const auto work = driver->submit(sum_of(count, "k"), data.data());
      CHECK_THROWS(driver->wait(work, kTimeout), MismatchError, "shape");
      driver->shutdown();
      const std::vector<uint64_t> ended = driver->take_ended();
      CHECK(work->idle());
      CHECK(std::find(ended.begin(), ended.end(), work->id) != ended.end());
    });
  }
}

// shutdown() took the transport away from another thread's wait() that was about to poll again.
void shutdown_waits_for_waiters() {
  std::atomic<bool> looks_away = false;
  run_drivers(2, {}, {}, [&](const Shared& driver) {
    float x = 1;
    if (driver->rank() == 1) until([&] { return looks_away.load(); });
    const auto work = driver->submit(sum_of(1, "late"), &x);
    if (driver->rank() == 0) {
      std::thread waiter([&] {
        driver->wait(work, kTimeout, [&] {
          looks_away = true;
          pause_ms(500);
        });
      });
      until([&] { return looks_away.load(); });
      driver->shutdown();
      waiter.join();
    } else {
      driver->wait(work, kTimeout);
    }
    CHECK_EQ(x, 2.0f);
  });
}

// Two threads in shutdown() waited for each other, or one failed as the engine was shut down.
void two_threads_shut_down() {
  for (int i = 0; i < 100; ++i) {
    run_drivers(2, {}, {}, [](const Shared& driver) {
      std::atomic<int> well = 0;
      const auto shut_down = [&] {
        try {
          driver->shutdown();
          well += driver->is_shut_down();
        } catch (const UsageError&) {
        }
      };
      std::thread other(shut_down);
      shut_down();
      other.join();
      CHECK_EQ(well.load(), 2);
    });
  }
}

// An interrupted shutdown() could not be repeated: the next one waited for the first.
void interrupted_shutdown_is_repeated() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    if (driver->rank() == 0) {
      CHECK_THROWS(driver->shutdown([] { throw Error("interrupted"); }), Error, "interrupted");
    } else {
      pause_ms(300);
    }
    driver->shutdown();
    CHECK(driver->is_shut_down());
  });
}

// Works that can never match kept ranks with two calling threads in shutdown() for ever.
void shutdown_ends_what_never_matches() {
  run_drivers(2, {}, {}, [](const Shared& driver) {
    float x = 1;
    float y = 1;
    std::thread other([&] { driver->wait(driver->submit(sum_of(1, "t"), &x), kTimeout); });
    other.join();
    const std::string own = "own of rank " + std::to_string(driver->rank());
    const auto work = driver->submit(sum_of(1, own), &y);
    CHECK_THROWS(driver->wait(work, kSecond / 4), StallError, "has not arrived");
    driver->shutdown();
    CHECK_THROWS(driver->wait(work, kTimeout), MismatchError, own);
  });
}

// Rank 3 leaves. Rank 0 notifies rank 1, which arrives too late for anything but the error and
// leaves as well; rank 2 was notified of that before rank 0 had reported rank 3, and blamed rank 1.
void only_who_never_came_is_blamed(bool by_bucket) {
  const int told = by_bucket ? 1 : 2;
  std::atomic<int> buckets = 0;
  std::atomic<int> sent_to_next = 0;
  std::atomic<bool> is_ending = false;
  std::atomic<bool> has_left = false;
  const auto wrap = [&](std::unique_ptr<Transport> below) -> std::unique_ptr<Transport> {
    Hooks hooks;
    if (below->rank() == 0) {
      hooks.sent = [&](int to, int tag) {  // a header, unless it is a bucket; then the error
        if (to != 1 || tag != 0 || ++sent_to_next != told) return;
        until([&] { return has_left.load(); });
        pause_ms(50);
      };
    } else if (below->rank() == 1) {
      hooks.sent = [&](int to, int) { has_left = has_left || (to == 2 && is_ending); };
    }
    return std::make_unique<Hooked>(std::move(below), std::move(hooks));
  };
  const auto body = [&](const Shared& driver) {
    float x = 1;
    if (by_bucket) {
      driver->add_bucket(0, {nullptr,
                             &x,
                             sizeof(x),
                             DType::kFloat32,
                             Reduction::kSum,
                             {},
                             "bucket",
                             driver->group_of_all_ranks()});
      ++buckets;
      until([&] { return buckets == 4; });
    }
    if (driver->rank() == 3) return;
    if (driver->rank() == 1) {
      until([&] { return sent_to_next == told; });
      driver->wake();
      pause_ms(50);
    }
    const auto sum = [&] {
      driver->wait(by_bucket ? driver->launch_bucket(
                                   0, [] {}, true)
                             : driver->submit(sum_of(1, "k"), &x),
                   kTimeout);
    };
    CHECK_THROWS(sum(), MismatchError, "rank 3 has shut down");
    if (driver->rank() == 1) is_ending = true;
  };
  run_drivers(4, {}, {}, body, wrap);
  CHECK(has_left);
}

// A signal handler that shuts down while its own thread waits waited for itself.
void shutdown_within_wait() {
  std::atomic<bool> is_handling = false;
  run_drivers(2, {}, {}, [&](const Shared& driver) {
    float x = 1;
    if (driver->rank() == 1) until([&] { return is_handling.load(); });
    const auto work = driver->submit(sum_of(1, "late"), &x);
    driver->wait(work, kTimeout, [&] {
      is_handling = true;
      if (driver->rank() == 0) driver->shutdown();
    });
    CHECK_EQ(x, 2.0f);
  });
}

// A forked child that released an engine waited for its parent's progress thread.
void forked_child_lets_go() {
  auto transports = make_loopback(2);
  Shared first = make_driver(std::move(transports[0]), {});
  const Shared second = make_driver(std::move(transports[1]), {});
  pause_ms(200);
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    bool refused = false;
    try {
      first->submit({}, nullptr);
    } catch (const UsageError&) {
      refused = true;
    }
    first.reset();
    _exit(refused ? 7 : 8);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 7);
  std::thread other([&] { second->shutdown(); });
  first->shutdown();
  other.join();
}

// A rank ended before the answers to its questions arrived. Where a send needs the receiver to take
// it, as with MPICH once a queue is full, the other rank's shutdown() never ended.
void late_answers_are_taken() {
  run_drivers(2, {}, {0, 0}, [](const Shared& driver) {
    std::vector<float> data(60, 1.0f);
    for (size_t i = 0; i < data.size(); ++i) {
      const std::string name = "late " + std::to_string(i);
      if (driver->rank() == 1) barrier(*driver);
      const auto work = driver->submit(sum_of(1, name), &data[i]);
      if (driver->rank() == 0) {
        CHECK_THROWS(driver->wait(work, 10 * kMillisecond, {}, false), StallError, name);
        barrier(*driver);
      }
      driver->wait(work, kTimeout);
    }
    if (driver->rank() == 0) pause_ms(200);
    const int64_t begin = now_ns();
    driver->shutdown();
    CHECK(now_ns() - begin < 5 * kSecond);
  });
}

// The same for a rank that has a work in flight, and asks when notified that the other has left.
void answers_come_before_the_end() {
  run_drivers(2, {}, {0, 0}, [](const Shared& driver) {
    std::vector<float> data(200, 1.0f);
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; i < data.size() && driver->rank() == 0; ++i) {
      works.push_back(driver->submit(sum_of(1, "never " + std::to_string(i)), &data[i]));
    }
    if (driver->rank() == 1) pause_ms(100);
    driver->shutdown();
    CHECK(std::ranges::all_of(works, [](const auto& work) { return work->ended(); }));
  });
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> cases[] = {
      {"failed_works_leave_before_shutdown", failed_works_leave_before_shutdown},
      {"shutdown_waits_for_waiters", shutdown_waits_for_waiters},
      {"two_threads_shut_down", two_threads_shut_down},
      {"interrupted_shutdown_is_repeated", interrupted_shutdown_is_repeated},
      {"shutdown_ends_what_never_matches", shutdown_ends_what_never_matches},
      {"only_who_never_came_is_blamed", [] { only_who_never_came_is_blamed(false); }},
      {"only_who_never_came_is_blamed, buckets", [] { only_who_never_came_is_blamed(true); }},
      {"shutdown_within_wait", shutdown_within_wait},
      {"forked_child_lets_go", forked_child_lets_go},
      {"late_answers_are_taken", late_answers_are_taken},
      {"answers_come_before_the_end", answers_come_before_the_end},
  };
  for (const auto& [name, body] : cases) in_child(name, 20, body);
  return report();
}

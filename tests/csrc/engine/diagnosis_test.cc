// Many ranks, of which some are late, silent or gone: those that wait name just these, after a few
// messages each.

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
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

std::string text_of(const std::set<int>& ranks) {
  return ranks_text(std::vector<int>(ranks.begin(), ranks.end()));
}

// All ranks wait for the same key except those that are late, some of which do not even answer.
// Each one's error names all of these. Then all ends well.
void stalls(int size, const std::set<int>& late, const std::set<int>& silent, bool is_reversed,
            int64_t most_messages) {
  std::atomic<int> named = 0;
  std::vector<std::atomic<bool>> is_stopped(static_cast<size_t>(size));
  std::atomic<size_t> stopped = 0;
  const int waiting = size - static_cast<int>(late.size() + silent.size());
  const auto wrap = [&](std::unique_ptr<Transport> below) -> std::unique_ptr<Transport> {
    Hooks hooks;
    if (silent.contains(below->rank()))
      hooks.may_poll = [&stops = is_stopped[below->rank()]] { return !stops; };
    return std::make_unique<Hooked>(std::move(below), std::move(hooks));
  };
  run_drivers(
      size, {}, {},
      [&](const Shared& driver) {
        const int rank = driver->rank();
        std::vector<int> order;
        for (int i = 0; i < size; ++i) order.push_back(is_reversed ? size - 1 - i : i);
        Call call = sum_of(3, "late");
        if (is_reversed) call.group = group_of(order, rank, size, 7);
        std::vector<float> data(3, 1.0f);
        barrier(*driver);
        if (late.contains(rank) || silent.contains(rank)) {
          is_stopped[rank] = silent.contains(rank);
          stopped += silent.count(rank);
          for (int i = 0; i < 1500 && named < waiting; ++i) pause_ms(10);
          is_stopped[rank] = false;
          driver->wait(driver->submit(call, data.data()), 2 * kTimeout);
        } else {
          until([&] { return stopped == silent.size(); });
          const auto work = driver->submit(call, data.data());
          const double before = driver->stats().at("messages_sent");
          try {
            driver->wait(work, 3 * kSecond);
            CHECK(false);
          } catch (const StallError& error) {
            const std::string what = error.what();
            const bool names_late =
                late.empty() ||
                what.find(": " + text_of(late) + (late.size() == 1 ? " has" : " have") +
                          " not arrived") != std::string::npos;
            const bool names_silent =
                silent.empty() ||
                what.find(text_of(silent) + " did not answer (") != std::string::npos;
            record(names_late && names_silent, __FILE__, __LINE__, what);
          }
          const double sent = driver->stats().at("messages_sent") - before;
          record(sent <= static_cast<double>(most_messages), __FILE__, __LINE__,
                 std::to_string(sent) + " messages of rank " + std::to_string(rank));
          ++named;
          driver->wait(work, 2 * kTimeout);
        }
        CHECK_EQ(data[0], static_cast<float>(size));
      },
      wrap);
}

void few_are_late() {
  stalls(16, {5}, {}, false, 40);
  stalls(16, {0}, {}, true, 40);
  stalls(24, {0, 1, 23}, {}, false, 60);
}

void some_do_not_answer() {
  stalls(16, {3}, {4, 5}, false, 60);
  stalls(8, {}, {0}, true, 40);
}

// The only one that waits asks all; nobody else knows.
void most_are_late() {
  std::set<int> late;
  for (int rank = 1; rank < 16; ++rank) late.insert(rank);
  stalls(16, late, {}, false, 40);
}

// A rank leaves early. Those that wait are notified via others, though the next rank has nothing to
// ask it.
void early_leaver_is_blamed() {
  constexpr int kSize = 16;
  constexpr int kLeaver = 9;
  std::atomic<int> blaming = 0;
  run_drivers(kSize, {}, {}, [&](const Shared& driver) {
    barrier(*driver);
    const int rank = driver->rank();
    if (rank == kLeaver) return;
    float x = 1;
    if (rank == kLeaver + 1) until([&] { return blaming == kSize - 2; });
    const int64_t begin = now_ns();
    CHECK_THROWS(driver->wait(driver->submit(sum_of(1, "k"), &x), kTimeout), MismatchError,
                 "rank 9 has shut down without submitting allreduce 'k'");
    CHECK(now_ns() - begin < 5 * kSecond);
    ++blaming;
  });
}

// Ranks leave at any time: each is notified of all others before it closes, in a few messages.
void departures_take_few_messages() {
  for (const int size : {2, 3, 5, 6, 22, 40}) {
    for (const int spread_ms : {0, 200}) {
      run_drivers(size, {}, {}, [&](const Shared& driver) {
        barrier(*driver);
        const double before = driver->stats().at("messages_sent");
        if (spread_ms > 0) pause_ms(driver->rank() * 37 % spread_ms);
        driver->shutdown();
        const double sent = driver->stats().at("messages_sent") - before;
        record(sent <= (spread_ms == 0 ? 16 : 30), __FILE__, __LINE__,
               std::to_string(sent) + " messages of rank " + std::to_string(driver->rank()));
      });
    }
  }
}

// Two groups of ranks wait for each other's key: rank 0 asks all about both, and nobody is stuck
// while a late rank may still arrive.
void stuck_ranks_are_told_among_many() {
  constexpr int kSize = 12;
  run_drivers(kSize, {}, {}, [&](const Shared& driver) {
    const bool is_odd = driver->rank() % 2 == 1;
    float x = 1;
    CHECK_THROWS(driver->wait(driver->submit(sum_of(1, is_odd ? "odd" : "even"), &x), kTimeout),
                 MismatchError, "wait for one another");
    driver->wait(driver->submit(sum_of(1, "even"), &x), kTimeout);
  });
}

// The more ranks, the less each of them puts into slots: it reads those of all.
void slots_hold_less_of_many_ranks() {
  for (const int size : {2, 3, 8}) CHECK_EQ(Slots::most_bytes(size), size_t{64} << 10);
  CHECK_EQ(Slots::most_bytes(16), size_t{32} << 10);
  CHECK_EQ(Slots::most_bytes(64), size_t{8} << 10);
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> cases[] = {
      {"few_are_late", few_are_late},
      {"some_do_not_answer", some_do_not_answer},
      {"most_are_late", most_are_late},
      {"early_leaver_is_blamed", early_leaver_is_blamed},
      {"departures_take_few_messages", departures_take_few_messages},
      {"stuck_ranks_are_told_among_many", stuck_ranks_are_told_among_many},
      {"slots_hold_less_of_many_ranks", slots_hold_less_of_many_ranks},
  };
  for (const auto& [name, body] : cases) in_child(name, 60, body);
  return report();
}

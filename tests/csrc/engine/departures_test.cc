// Which ranks have left: known to all in the end, with no message after that; and what a rank waits
// for.

#include "engine/departures.h"

#include <algorithm>
#include <memory>
#include <random>
#include <ranges>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/control.h"
#include "transport/loopback/loopback.h"

using namespace ringdl;

namespace {

// Ranks that are moved in turns by one thread, with a clock of their own.
class Ranks {
 public:
  explicit Ranks(int size) : transports_(make_loopback(size)) {
    for (int rank = 0; rank < size; ++rank) {
      controls_.push_back(std::make_unique<ControlPlane>(
          *transports_[static_cast<size_t>(rank)],
          [this, rank](const ControlMessage& message) { arrive(rank, message); }));
    }
    for (int rank = 0; rank < size; ++rank) {
      departures_.push_back(
          std::make_unique<Departures>(*controls_[static_cast<size_t>(rank)], rank, size));
    }
  }
  ~Ranks() {
    for (const auto& control : controls_) control->close();
  }

  Departures& operator[](int rank) { return *departures_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(departures_.size()); }
  int64_t now() const { return now_; }

  void leave(int rank) { (*this)[rank].leave(now_); }

  void move(int64_t ns) {
    now_ += ns;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == dead_) continue;
      transports_[static_cast<size_t>(rank)]->poll();
      (*this)[rank].check(now_);
    }
  }

  void kill(int rank) { dead_ = rank; }

  // What `to` receives from `from` is lost.
  void cut(int from, int to) {
    cut_from_ = from;
    cut_to_ = to;
  }

 private:
  void arrive(int rank, const ControlMessage& message) {
    if (message.head.type == MessageType::kQuiet) {
      CHECK(!(*this)[rank].are_all_quiet() || dead_ >= 0);
      (*this)[rank].on_quiet(message.from);
      return;
    }
    CHECK(!(*this)[rank].is_over());
    if (message.from != cut_from_ || rank != cut_to_) (*this)[rank].on_leaving(message, now_);
  }

  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<ControlPlane>> controls_;
  std::vector<std::unique_ptr<Departures>> departures_;
  int64_t now_ = kSecond;
  int dead_ = -1;
  int cut_from_ = -1;
  int cut_to_ = -1;
};

// Each rank says what it waits for while it waits; only one names the missing ranks.
void check_words(Ranks& ranks) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].has_left(rank)) continue;
    const std::vector<bool>& left = ranks[rank].left();
    const auto missing = std::ranges::count(left, false);
    const auto first = std::ranges::find(left, true) - left.begin();
    CHECK_EQ(!ranks[rank].awaited().empty(), missing > 0 ? first == rank : !ranks[rank].is_over());
  }
}

void all_leave_in_any_order() {
  for (int size = 1; size <= 40; ++size) {
    for (unsigned seed = 0; seed < 10; ++seed) {
      std::mt19937 random(seed);
      const int together = seed % 2 == 0 ? 0 : 300;  // or within so many ms
      Ranks ranks(size);
      std::vector<int64_t> leaves;
      for (int rank = 0; rank < size; ++rank) {
        leaves.push_back(ranks.now() + (together == 0 ? 0 : random() % together) * kMillisecond);
      }
      for (int turn = 0; turn < 500; ++turn) {
        for (int rank = 0; rank < size; ++rank) {
          if (ranks.now() >= leaves[static_cast<size_t>(rank)]) ranks.leave(rank);
        }
        ranks.move(5 * kMillisecond);
        check_words(ranks);
      }
      for (int rank = 0; rank < size; ++rank) CHECK(ranks[rank].are_all_quiet());
    }
  }
}

void who_has_not_left_is_named_once() {
  Ranks ranks(6);
  for (const int rank : {1, 2, 3, 5}) ranks.leave(rank);
  for (int turn = 0; turn < 100; ++turn) ranks.move(5 * kMillisecond);
  CHECK_EQ(ranks[1].awaited(), std::string("ranks 0 and 4, which did not call it yet"));
  for (const int rank : {2, 3, 5}) CHECK_EQ(ranks[rank].awaited(), std::string());
}

// Both were silent: all were known to have left.
void a_lost_message_is_named() {
  const auto words_without = [](int from, int to, int teller) {
    Ranks ranks(8);
    ranks.cut(from, to);
    for (int rank = 0; rank < 8; ++rank) ranks.leave(rank);
    for (int turn = 0; turn < 100; ++turn) ranks.move(5 * kMillisecond);
    return ranks[teller].awaited();
  };
  CHECK_EQ(words_without(2, 3, 3), std::string("a message that rank 2 called it, on rank 3"));
  CHECK_EQ(words_without(7, 1, 0), std::string("a message that rank 7 called it, on rank 0"));
}

// A rank that has left, and is killed before all is quiet, holds up nobody.
void the_dead_are_quiet() {
  for (const int dead : {0, 1, 2, 5, 7}) {
    Ranks ranks(8);
    for (int rank = 0; rank < 8; ++rank) ranks.leave(rank);
    while (!std::ranges::all_of(std::views::iota(0, 8),
                                [&](int rank) { return ranks[rank].is_over(); })) {
      ranks.move(5 * kMillisecond);
    }
    ranks.kill(dead);
    for (int turn = 0; turn < 100; ++turn) ranks.move(5 * kMillisecond);
    for (int rank = 0; rank < 8; ++rank) {
      if (rank != dead) ranks[rank].on_quiet(dead);
    }
    for (int turn = 0; turn < 100; ++turn) ranks.move(5 * kMillisecond);
    for (int rank = 0; rank < 8; ++rank) CHECK(rank == dead || ranks[rank].are_all_quiet());
  }
}

}  // namespace

int main() {
  all_leave_in_any_order();
  who_has_not_left_is_named_once();
  a_lost_message_is_named();
  the_dead_are_quiet();
  return check::report();
}

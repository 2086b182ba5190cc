// Calls that a rank answers without having made them: in their callers' order, before and after a
// box is opened, by ranks that wait, have joined or do nothing; and what ends them otherwise.

#include "engine/mailbox.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "boxes.h"
#include "calls.h"
#include "cluster.h"

using namespace ringdl;
using check::Question;
using check::Sums;

namespace {

// All ranks ask all others, many times at once, short messages and long ones; nobody waits.
void test_order() {
  for (const size_t count : {1, 100, 1500}) {
    check::Cluster cluster(4);
    const int size = cluster.size();
    constexpr int kCalls = 10;
    std::vector<std::shared_ptr<Sums>> boxes;
    std::vector<std::shared_ptr<Work>> works;
    std::vector<int64_t> sums(static_cast<size_t>(size * size * kCalls), -1);
    const auto place = [&](int from, int to, int number) -> int64_t& {
      return sums[static_cast<size_t>((from * size + to) * kCalls + number)];
    };
    const auto name_of = [](Engine& engine) { return BoxName{"sums", engine.parts().all}; };
    for (int rank = 0; rank < size; ++rank) {
      boxes.push_back(std::make_shared<Sums>(count, size));
      boxes.back()->end_after((size - 1) * kCalls);
      if (rank % 2 == 0) cluster[rank].parts().mailbox.open(name_of(cluster[rank]), boxes.back());
    }
    for (int number = 0; number < kCalls; ++number) {
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          if (from == to) continue;
          const std::vector<int64_t> numbers(count, number + from);
          works.push_back(
              cluster[from].call_box(name_of(cluster[from]), to,
                                     std::make_unique<Question>(numbers, place(from, to, number))));
        }
      }
    }
    CHECK(!cluster.poll_until([&] { return boxes[1]->answered() > 0; }, 10 * kMillisecond));
    for (int rank = 1; rank < size; rank += 2) {
      cluster[rank].parts().mailbox.open(name_of(cluster[rank]), boxes[static_cast<size_t>(rank)]);
    }
    CHECK(cluster.finish(works));
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        int64_t sum = 0;
        for (int number = 0; number < kCalls && from != to; ++number) {
          sum += static_cast<int64_t>(count) * (number + from);
          CHECK_EQ(place(from, to, number), sum);
        }
      }
    }
    // Those that are over are closed.
    cluster.poll_until([&] { return !cluster[0].is_busy(); });
    for (int rank = 0; rank < size; ++rank) {
      CHECK(cluster[rank].parts().mailbox.open_boxes() == 0);
      CHECK(!cluster[rank].is_busy());
    }
  }
}

// Boxes of other names and groups are others.
void test_names() {
  check::Cluster cluster(3);
  std::vector<std::shared_ptr<Work>> works;
  std::vector<int64_t> sums(3);
  std::vector<SharedGroup> pairs;
  for (int rank = 0; rank < 2; ++rank) pairs.push_back(group_of({1, 0}, rank, 3, 0));
  const auto& all = cluster[0].parts().all;
  const std::vector<BoxName> here{{"a", all}, {"b", all}, {"a", pairs[0]}};
  const auto& all_of_1 = cluster[1].parts().all;
  const std::vector<BoxName> there{{"a", all_of_1}, {"b", all_of_1}, {"a", pairs[1]}};
  for (size_t i = 0; i < 3; ++i) {
    cluster[0].parts().mailbox.open(here[i], std::make_shared<Sums>(i + 1, 3));
  }
  for (size_t i = 0; i < 3; ++i) {
    const int to = i == 2 ? 1 : 0;  // its number in the group
    works.push_back(cluster[1].call_box(
        there[i], to, std::make_unique<Question>(std::vector<int64_t>(i + 1, 10), sums[i])));
  }
  CHECK(cluster.finish(works));
  CHECK(sums == (std::vector<int64_t>{10, 20, 30}));
}

// In whatever a rank is: computing, waiting for something else, or joined.
void test_what_the_answering_rank_does() {
  check::run_ranks(3, {}, {}, [](Driver& driver) {
    const BoxName name{"sums", driver.group_of_all_ranks()};
    const auto box = std::make_shared<Sums>(5, 3);
    box->end_after(1'000'000);
    if (driver.rank() == 0) driver.open_box(name, box);
    int64_t sum = 0;
    const auto ask = [&](int64_t expected) {
      const auto work =
          driver.call_box(name, 0, std::make_unique<Question>(std::vector<int64_t>(5, 1), sum));
      driver.wait(work, check::kTimeout, {}, false);
      CHECK_EQ(sum, expected);
    };
    if (driver.rank() == 0) {
      check::pause_ms(200);
    } else {
      ask(5);
    }
    check::barrier(driver);
    if (driver.rank() != 0) ask(10);
    check::barrier(driver);
    if (driver.rank() != 0) {
      check::pause_ms(100);  // rank 0 has joined
      for (int i = 3; i < 20; ++i) ask(5 * i);
    }
    driver.join(check::kTimeout);
    check::barrier(driver);
  });
}

// A rank that shuts down goes on to answer until the others have, too.
void test_shut_down_ranks_answer() {
  check::run_ranks(3, {}, {}, [](Driver& driver) {
    const BoxName name{"sums", driver.group_of_all_ranks()};
    const auto box = std::make_shared<Sums>(5, 3);
    box->end_after(1'000'000);
    driver.open_box(name, box);
    check::barrier(driver);
    if (driver.rank() == 0) return;
    check::pause_ms(100);
    int64_t sum = 0;
    for (int i = 1; i < 200; ++i) {
      const auto work =
          driver.call_box(name, 0, std::make_unique<Question>(std::vector<int64_t>(5, 1), sum));
      driver.wait(work, check::kTimeout, {}, false);
      CHECK_EQ(sum, 5 * i);
    }
  });
}

// A rank that shuts down, or gives up: the other side gets to know.
void test_ends() {
  check::run_ranks(2, {}, {}, [](Driver& driver) {
    const BoxName name{"sums", driver.group_of_all_ranks()};
    int64_t sum = 0;
    if (driver.rank() == 1) {
      const auto work =
          driver.call_box(name, 0, std::make_unique<Question>(std::vector<int64_t>(5, 1), sum));
      CHECK_THROWS(driver.wait(work, 300 * kMillisecond, {}, false), StallError,
                   "message 'sums' from rank 1 to rank 0 did not end within 0.3 s");
      driver.give_up(work, "it takes too long");
      CHECK_THROWS(driver.wait(work, check::kTimeout), MismatchError, "it takes too long");
    }
    check::barrier(driver);
    // What was given up has used its turn on both ranks.
    if (driver.rank() == 0) driver.open_box(name, std::make_shared<Sums>(5, 2));
    if (driver.rank() == 1) {
      const auto work =
          driver.call_box(name, 0, std::make_unique<Question>(std::vector<int64_t>(5, 1), sum));
      driver.wait(work, check::kTimeout, {}, false);
      CHECK_EQ(sum, 5);
      const BoxName other{"others", driver.group_of_all_ranks()};
      const auto lost =
          driver.call_box(other, 0, std::make_unique<Question>(std::vector<int64_t>(5, 1), sum));
      CHECK_THROWS(driver.wait(lost, check::kTimeout, {}, false), MismatchError,
                   "rank 0 has shut down without submitting message 'others'");
    }
  });
}

}  // namespace

int main() {
  test_order();
  test_names();
  test_what_the_answering_rank_does();
  test_shut_down_ranks_answer();
  test_ends();
  return check::report();
}

// Memory that ranks of one host share: who has which part, and other processes.

#include "transport/host/window.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>

#include "base/clock.h"
#include "check.h"
#include "ranks.h"
#include "transport/host/store_trial.h"

using namespace ringdl;

namespace {

void test_heap() {
  constexpr uint64_t kEnd = 100000;
  Heap heap(64, kEnd);
  std::mt19937_64 random(1);
  std::map<uint64_t, uint64_t> held;  // begin -> bytes
  for (int i = 0; i < 20000; ++i) {
    if (!held.empty() && random() % 2 == 0) {
      auto one = held.begin();
      std::advance(one, static_cast<int64_t>(random() % held.size()));
      heap.give_back(one->first);
      held.erase(one);
      continue;
    }
    const uint64_t bytes = random() % 3000;
    const auto begin = heap.take(bytes, 64);
    if (!begin) continue;
    const auto after = held.upper_bound(*begin);
    bool is_free = *begin >= 64 && *begin % 64 == 0 && *begin + bytes <= kEnd;
    if (after != held.end()) is_free &= *begin + bytes <= after->first;
    if (after != held.begin()) {
      is_free &= std::prev(after)->first + std::prev(after)->second <= *begin;
    }
    CHECK(is_free);
    held[*begin] = bytes;
  }
  for (const auto& [begin, bytes] : held) heap.give_back(begin);
  CHECK(heap.take(kEnd - 64, 64).has_value());
  CHECK(!heap.take(1, 64).has_value());
}

void test_memory_is_given_back() {
  const auto windows = check::connected_windows(2, 8 << 20);
  Window& window = *windows[0];
  CHECK(!window.offset_of(&window, 1).has_value());
  std::shared_ptr<std::byte> large = window.allocate(5 << 20);
  CHECK_EQ(reinterpret_cast<uintptr_t>(large.get()) % 64, 0u);
  const uint64_t offset = *window.offset_of(large.get(), 5 << 20);
  CHECK(!window.offset_of(large.get(), 8 << 20).has_value());
  CHECK_EQ(windows[1]->at(0, offset), large.get());
  CHECK_THROWS(window.allocate(5 << 20), std::bad_alloc, "");
  std::memset(large.get(), 1, 5 << 20);
  large.reset();
  large = window.allocate(5 << 20);
  CHECK_EQ(*window.offset_of(large.get(), 1), offset);
  CHECK(large.get()[2 << 20] == std::byte{0});  // its pages went back to the system
}

void test_stages_are_kept_for_the_next() {
  const auto windows = check::connected_windows(2, 8 << 20);
  Window& window = *windows[0];
  std::shared_ptr<std::byte> stage = window.allocate(3 << 20);
  const uint64_t offset = *window.offset_of(stage.get(), 1);
  stage.get()[1 << 20] = std::byte{1};
  stage.reset();
  std::shared_ptr<std::byte> other = window.allocate(2 << 20);
  CHECK(*window.offset_of(other.get(), 1) != offset);
  stage = window.allocate(3 << 20);
  CHECK_EQ(*window.offset_of(stage.get(), 1), offset);
  CHECK(stage.get()[1 << 20] == std::byte{1});
  stage.reset();
  other.reset();
  stage = window.allocate(7 << 20);  // for which there is room without them
  CHECK(stage.get()[1 << 20] == std::byte{0});
}

void test_kept_until_counted() {
  const auto windows = check::connected_windows(2, 1 << 20);
  std::atomic<uint64_t> counter = 0;
  std::shared_ptr<std::byte> memory = windows[0]->allocate(64);
  const std::weak_ptr<std::byte> look = memory;
  windows[0]->free_once(std::move(memory), counter, 2);
  CHECK(!look.expired());
  counter = 2;
  windows[0]->free_once(windows[0]->allocate(64), counter, 2);
  CHECK(look.expired());
}

// Not by fork alone: what a child inherits it need not map.
void test_other_processes() {
  auto segment = Segment::create(1 << 20);
  const Segment::Address address = segment->address();
  segment->data()[4096] = std::byte{7};
  const pid_t child = fork();
  if (child == 0) {
    const auto theirs = Segment::open(address);
    if (!theirs || theirs->data() == segment->data()) _exit(1);
    if (theirs->data()[4096] != std::byte{7}) _exit(2);
    theirs->data()[8192] = std::byte{8};
    Segment::Address other = address;
    ++other.nonce;
    if (Segment::open(other)) _exit(3);
    other = address;
    other.bytes *= 2;
    if (Segment::open(other)) _exit(4);
    other = address;
    other.descriptor = 9999;
    if (Segment::open(other)) _exit(5);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK(segment->data()[8192] == std::byte{8});
  segment.reset();
  CHECK(!Segment::open(address));
}

// Not while it lives, though it may have let go of its memory.
void test_processes_that_have_ended() {
  int to_parent[2];
  int to_child[2];
  CHECK(pipe(to_parent) == 0 && pipe(to_child) == 0);
  const pid_t child = fork();
  if (child == 0) {
    close(to_child[1]);
    Window theirs(1, 2, 1 << 20);
    const Segment::Address address = theirs.address();
    char byte = 0;
    const bool is_told = write(to_parent[1], &address, sizeof(address)) == sizeof(address);
    _exit(is_told && read(to_child[0], &byte, 1) == 0 ? 0 : 1);
  }
  Segment::Address address{};
  CHECK(read(to_parent[0], &address, sizeof(address)) == sizeof(address));
  Window window(0, 2, 1 << 20);
  CHECK(window.reach(0, window.address()) && window.reach(1, address));
  CHECK(!window.has_ended(0) && !window.has_ended(1));
  close(to_child[1]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(!window.has_ended(0) && window.has_ended(1));
  for (const int descriptor : {to_parent[0], to_parent[1], to_child[0]}) close(descriptor);
}

// A child that lets go of what it inherited leaves the parent's memory alone.
void test_forked_children_free_nothing() {
  const auto windows = check::connected_windows(1, 8 << 20);
  std::shared_ptr<std::byte> memory = windows[0]->allocate(4 << 20);
  std::memset(memory.get(), 1, 4 << 20);
  const pid_t child = fork();
  if (child == 0) {
    memory.reset();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(memory.get()[2 << 20] == std::byte{1});
}

// What takes less time is taken, and something else once that takes less; a pair of blocks that
// says otherwise changes nothing, nor does a last part of a block.
void test_the_faster_stores_are_found() {
  const auto takes = [](int64_t ns) {
    const int64_t begin = thread_cpu_ns();
    while (thread_cpu_ns() - begin < ns) {
    }
  };
  StoreTrial trial;
  bool past_the_caches = false;
  const auto store_array = [&](uint64_t blocks, bool is_odd_one_out) {
    const uint64_t first = trial.begin(blocks);
    int streamed = 0;
    for (uint64_t block = first; block < first + blocks; ++block) {
      const bool is_whole = block + 1 < first + blocks;
      const bool is_fast =
          (trial.streams(block) == past_the_caches) != (is_odd_one_out || !is_whole);
      streamed += static_cast<int>(trial.streams(block));
      trial.time(block, [&] { takes(is_fast ? 1000 : 50000); });
      trial.end(block, is_whole);
    }
    return streamed;
  };
  CHECK_EQ(store_array(7, false), 3);
  for (const bool now_past_the_caches : {false, true, false}) {
    past_the_caches = now_past_the_caches;
    for (int array = 0; array < 3; ++array) store_array(32, false);
    const int streamed = past_the_caches ? 31 : 1;  // a pair is tried both ways
    CHECK_EQ(store_array(32, false), streamed);
    CHECK_EQ(store_array(32, true), streamed);
    CHECK_EQ(store_array(32, false), streamed);
  }
}

}  // namespace

int main() {
  test_the_faster_stores_are_found();
  test_heap();
  test_memory_is_given_back();
  test_stages_are_kept_for_the_next();
  test_kept_until_counted();
  test_other_processes();
  test_processes_that_have_ended();
  test_forked_children_free_nothing();
  return check::report();
}

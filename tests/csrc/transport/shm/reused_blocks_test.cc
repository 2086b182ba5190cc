// Blocks that a program takes and gives back: which are reused, and which never.

#include "transport/shm/reused_blocks.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "child.h"
#include "transport/shm/segment_window.h"
#include "transport/simulated/heap_window.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

constexpr size_t kMiB = 1 << 20;

std::shared_ptr<HeapWindow> window(size_t bytes = 200 * kMiB) {
  return std::make_shared<HeapWindow>(
      0, HeapWindow::Memories{std::make_shared<HeapWindow::Memory>(bytes)});
}

void test_without_a_window() {
  ReusedBlocks blocks;
  CHECK(blocks.take(kMiB) == nullptr);
  int elsewhere = 0;
  CHECK(!blocks.give_back(&elsewhere));
  blocks.keep_for_good(&elsewhere);
}

void test_the_same_sizes_get_the_same_blocks() {
  ReusedBlocks blocks;
  blocks.set_window(window());
  std::set<void*> seen;
  for (int step = 0; step < 10; ++step) {
    std::vector<void*> step_blocks;
    for (const size_t bytes : {3 * kMiB, kMiB, kMiB, 2 * kMiB}) {
      step_blocks.push_back(blocks.take(bytes));
      CHECK_EQ(reinterpret_cast<uintptr_t>(step_blocks.back()) % 4096, 0u);
      std::memset(step_blocks.back(), step, bytes);
    }
    CHECK_EQ(std::set<void*>(step_blocks.begin(), step_blocks.end()).size(), 4u);
    seen.insert(step_blocks.begin(), step_blocks.end());
    for (void* block : step_blocks) CHECK(blocks.give_back(block));
  }
  CHECK_EQ(seen.size(), 4u);
  CHECK(!blocks.give_back(*seen.begin()));  // twice
}

// Programs that take turns use the same memory, whatever the sizes of their blocks.
void test_other_sizes_get_the_same_memory() {
  ReusedBlocks blocks;
  blocks.set_window(window());
  void* const large = blocks.take(30 * kMiB);
  blocks.give_back(large);
  void* const small = blocks.take(4 * kMiB);
  CHECK(small == large);
  CHECK(blocks.take(8 * kMiB) == static_cast<std::byte*>(large) + 4 * kMiB);
}

void test_memory_ends() {
  ReusedBlocks blocks;
  const auto limited = window(200 * kMiB);
  blocks.set_window(limited);
  void* const block = blocks.take(40 * kMiB);
  CHECK(block != nullptr);
  CHECK(blocks.take(60 * kMiB) == nullptr);
  CHECK(blocks.give_back(block));
  CHECK(blocks.take(40 * kMiB) == block);
  CHECK(limited->allocate(100 * kMiB) != nullptr);  // half of it is for others
  ReusedBlocks others;
  others.set_window(window(10 * kMiB));  // too little for a region
  CHECK(others.take(kMiB) == nullptr);
}

// Whether the end of a block has kept its content after so many other takes.
bool stays(int takes, size_t bytes) {
  ReusedBlocks blocks;
  blocks.set_window(std::make_shared<SegmentWindow>(0, 1, 1024 * kMiB));
  auto* const block = static_cast<std::byte*>(blocks.take(bytes));
  block[bytes - 1] = std::byte{7};
  blocks.give_back(block);
  for (int i = 0; i < takes; ++i) blocks.give_back(blocks.take(kMiB));
  CHECK(blocks.take(bytes) == block);
  return block[bytes - 1] == std::byte{7};
}

void test_pages_go_back_that_nobody_has_needed_for_long() {
  CHECK(stays(900, 100 * kMiB));
  CHECK(!stays(2000, 100 * kMiB));
  CHECK(stays(2000, 50 * kMiB));
}

void test_another_window() {
  ReusedBlocks blocks;
  blocks.set_window(window());
  auto* const early = static_cast<std::byte*>(blocks.take(kMiB));
  void* const kept = blocks.take(2 * kMiB);
  blocks.give_back(kept);
  std::memset(early, 7, kMiB);
  const auto second = window();
  blocks.set_window(second);
  CHECK_EQ(static_cast<int>(early[kMiB - 1]), 7);  // it is valid for as long as it is taken
  CHECK(blocks.give_back(early));
  void* const late = blocks.take(kMiB);
  CHECK(second->offset_of(late, kMiB).has_value());
  blocks.set_window(nullptr);
  CHECK(blocks.take(kMiB) == nullptr);
  CHECK(blocks.give_back(late));
}

// Its free pages go back at once, and those of its blocks when they are given back.
void test_an_earlier_window_holds_no_pages() {
  ReusedBlocks blocks;
  blocks.set_window(std::make_shared<SegmentWindow>(0, 1, 1024 * kMiB));
  auto* const first = static_cast<std::byte*>(blocks.take(kMiB));
  auto* const second = static_cast<std::byte*>(blocks.take(kMiB));
  auto* const third = static_cast<std::byte*>(blocks.take(kMiB));
  auto* const last = static_cast<std::byte*>(blocks.take(kMiB));
  for (std::byte* block : {first, second, third}) std::memset(block, 7, kMiB);
  blocks.keep_for_good(third);
  blocks.give_back(first);
  blocks.set_window(window());
  CHECK_EQ(static_cast<int>(first[kMiB - 1]), 0);
  CHECK_EQ(static_cast<int>(second[0]), 7);
  CHECK_EQ(static_cast<int>(second[kMiB - 1]), 7);
  blocks.give_back(third);
  blocks.give_back(second);
  CHECK_EQ(static_cast<int>(second[kMiB - 1]), 0);
  CHECK_EQ(static_cast<int>(third[0]), 7);
  blocks.give_back(last);  // and the region, with what was kept
}

void test_what_is_kept_for_good() {
  ReusedBlocks blocks;
  blocks.set_window(window());
  auto* const block = static_cast<std::byte*>(blocks.take(kMiB));
  auto* const other = static_cast<std::byte*>(blocks.take(kMiB));
  blocks.keep_for_good(block + kMiB - 1);
  CHECK(blocks.give_back(block));
  CHECK(blocks.give_back(other));
  CHECK(blocks.take(kMiB) == other);
  CHECK(blocks.take(kMiB) != block);
}

// A child has the parent's memory, not a copy.
void test_a_child_takes_nothing() {
  ReusedBlocks blocks;
  const auto segment = std::make_shared<SegmentWindow>(0, 1, 1024 * kMiB);
  blocks.set_window(segment);
  void* const block = blocks.take(100 * kMiB);
  std::memset(block, 7, 100 * kMiB);
  in_child("a child gives back what it has inherited", 10, [&] {
    CHECK(blocks.take(kMiB) == nullptr);
    CHECK(blocks.give_back(block));
    blocks.set_window(nullptr);
    CHECK(segment->allocate(100) == nullptr);
  });
  CHECK(segment->allocate(100) != nullptr);
  CHECK(std::memchr(block, 0, 100 * kMiB) == nullptr);
  CHECK(blocks.take(kMiB) != block);
  CHECK(blocks.give_back(block));
}

void test_threads() {
  ReusedBlocks blocks;
  blocks.set_window(window());
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&blocks, number] {
      for (int turn = 0; turn < 500; ++turn) {
        const size_t bytes = kMiB + static_cast<size_t>(turn % 3) * 4096;
        auto* const block = static_cast<std::byte*>(blocks.take(bytes));
        std::memset(block, number, 64);
        std::memset(block + bytes - 64, number, 64);
        CHECK_EQ(static_cast<int>(block[0]) + static_cast<int>(block[bytes - 1]), 2 * number);
        CHECK(blocks.give_back(block));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  test_a_child_takes_nothing();
  test_without_a_window();
  test_the_same_sizes_get_the_same_blocks();
  test_other_sizes_get_the_same_memory();
  test_memory_ends();
  test_pages_go_back_that_nobody_has_needed_for_long();
  test_another_window();
  test_an_earlier_window_holds_no_pages();
  test_what_is_kept_for_good();
  test_threads();
  return report();
}

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
#include "heap_window.h"
#include "transport/shm/segment_window.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

constexpr size_t kMiB = 1 << 20;

std::shared_ptr<HeapWindow> window(size_t bytes = 64 * kMiB) {
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
      CHECK_EQ(reinterpret_cast<uintptr_t>(step_blocks.back()) % Window::kAlignment, 0u);
      std::memset(step_blocks.back(), step, bytes);
    }
    CHECK_EQ(std::set<void*>(step_blocks.begin(), step_blocks.end()).size(), 4u);
    seen.insert(step_blocks.begin(), step_blocks.end());
    for (void* block : step_blocks) CHECK(blocks.give_back(block));
  }
  CHECK_EQ(seen.size(), 4u);
  CHECK(!blocks.give_back(*seen.begin()));  // twice
}

void test_a_block_is_hardly_larger_than_asked() {
  ReusedBlocks blocks;
  blocks.set_window(window());
  blocks.give_back(blocks.take(30 * kMiB));  // as much may be held
  void* const large = blocks.take(9 * kMiB);
  blocks.give_back(large);
  void* const small = blocks.take(4 * kMiB);
  CHECK(small != large);
  CHECK(blocks.take(8 * kMiB + 4096) == large);
}

// The heap has room for 10 MiB: more than were taken at once are never held.
void test_no_more_is_held_than_was_taken_at_once() {
  ReusedBlocks blocks;
  blocks.set_window(window(10 * kMiB));
  for (size_t mib = 1; mib <= 9; ++mib) {
    void* const block = blocks.take(mib * kMiB);
    CHECK(block != nullptr);
    CHECK(blocks.give_back(block));
  }
  CHECK(blocks.take(11 * kMiB) == nullptr);
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
  blocks.set_window(std::make_shared<SegmentWindow>(0, 1, 64 * kMiB));
  void* const block = blocks.take(kMiB);
  in_child("a child gives back what it has inherited", 10, [&] {
    CHECK(blocks.take(kMiB) == nullptr);
    CHECK(blocks.give_back(block));
    blocks.set_window(nullptr);
  });
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
  test_a_block_is_hardly_larger_than_asked();
  test_no_more_is_held_than_was_taken_at_once();
  test_another_window();
  test_what_is_kept_for_good();
  test_threads();
  return report();
}

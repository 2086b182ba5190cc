// Memory that ranks of one host share: which rank has which part, and other processes.

#include "transport/shm/segment_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "ranks.h"
#include "transport/store_trial.h"

using namespace ringdl;

namespace {

// What MPI libraries see: they watch the first of these, not the second.
std::vector<std::pair<const std::byte*, const std::byte*>> removed;
int holes_punched = 0;
bool fails_to_allocate = false;

thread_local bool allocates_slowly = false;

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  if (allocates_slowly) sleep_ns(kMillisecond / 5);
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" int madvise(void* address, size_t bytes, int advice) noexcept {
  if (advice == MADV_REMOVE) {
    const auto* const begin = static_cast<const std::byte*>(address);
    removed.emplace_back(begin, begin + bytes);
  }
  return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}

extern "C" int fallocate(int descriptor, int mode, off_t begin, off_t bytes) {
  if ((mode & FALLOC_FL_PUNCH_HOLE) != 0) ++holes_punched;
  if (fails_to_allocate) return -1;
  return static_cast<int>(syscall(SYS_fallocate, descriptor, mode, begin, bytes));
}

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

// To the system, by a call that MPI libraries watch: else a network adapter would go on with the
// old pages.
void test_memory_is_given_back() {
  constexpr size_t kBytes = 40 << 20;
  const auto windows = check::connected_windows(2, 64 << 20);
  SegmentWindow& window = *windows[0];
  CHECK(!window.offset_of(&window, 1).has_value());
  std::shared_ptr<std::byte> array = window.allocate(kBytes);
  CHECK_EQ(reinterpret_cast<uintptr_t>(array.get()) % 64, 0u);
  const uint64_t offset = *window.offset_of(array.get(), kBytes);
  CHECK(!window.offset_of(array.get(), 64 << 20).has_value());
  CHECK_EQ(windows[1]->at(0, offset), array.get());
  CHECK(window.allocate(kBytes) == nullptr);
  std::memset(array.get(), 1, kBytes);
  const std::byte* const begin = array.get();
  removed.clear();
  holes_punched = 0;
  array.reset();
  CHECK_EQ(holes_punched, 0);
  CHECK_EQ(removed.size(), 1u);
  CHECK(!removed.empty() && removed[0].first - begin < 4096 &&
        begin + kBytes - removed[0].second < 4096);
  array = window.allocate(kBytes);
  CHECK_EQ(*window.offset_of(array.get(), 1), offset);
  CHECK(array.get()[kBytes / 2] == std::byte{0});
}

// For the next of their sizes, up to a bound, and no longer than there is room without them.
void test_arrays_are_kept_for_the_next() {
  const auto windows = check::connected_windows(1, 64 << 20);
  SegmentWindow& window = *windows[0];
  std::map<size_t, uint64_t> offsets;
  for (const size_t mib : {20, 9, 8, 6}) {  // more than is kept: the first goes
    const auto array = window.allocate(mib << 20);
    array.get()[4096] = std::byte{1};
    offsets[mib] = *window.offset_of(array.get(), 1);
  }
  for (const size_t mib : {6, 9, 8}) {
    const auto array = window.allocate(mib << 20);
    CHECK_EQ(*window.offset_of(array.get(), 1), offsets[mib]);
    CHECK(array.get()[4096] == std::byte{1});
  }
  const auto all = window.allocate(47 << 20);
  CHECK(all && all.get()[4096] == std::byte{0});
}

// Buckets and arrays made anew again and again, of other sizes, take no more memory in the end.
void test_freed_memory_is_used_again() {
  const auto windows = check::connected_windows(1, 256 << 20);
  SegmentWindow& window = *windows[0];
  std::mt19937_64 random(3);
  std::vector<std::shared_ptr<std::byte>> held(20);
  uint64_t highest = 0;
  for (int i = 0; i < 5000; ++i) {
    std::shared_ptr<std::byte>& one = held[random() % held.size()];
    one.reset();
    const size_t bytes = size_t{1} << (10 + random() % 12);
    one = window.allocate(bytes + random() % bytes);
    highest = std::max(highest, *window.offset_of(one.get(), 1));
  }
  CHECK(highest < 80u << 20);  // 20 of 4 MiB at most
}

// Bytes of pages.
int64_t bytes_there(const SegmentWindow& window) {
  struct stat status{};
  CHECK_EQ(fstat(static_cast<int>(window.address().descriptor), &status), 0);
  return status.st_blocks * 512;
}

// Repeated use of stages touches no new pages, whatever sizes were used before, also if several are
// in flight and arrays are made and freed beside them.
void test_stages_are_kept() {
  const auto windows = check::connected_windows(1, 512 << 20);
  SegmentWindow& window = *windows[0];
  const auto array = window.allocate(100 << 20);
  const auto round = [&] {
    for (const size_t bytes : {512 << 10, 2 << 20, 6 << 20, 300 << 10, 100, 16 << 20}) {
      std::vector<std::shared_ptr<std::byte>> stages;
      for (int i = 0; i < 3; ++i) {
        stages.push_back(window.allocate_stage(bytes + static_cast<size_t>(i) * 5000));
        std::memset(stages.back().get(), 1, bytes);
        const auto other = window.allocate(1 << 20);
        std::memset(other.get(), 1, 1 << 20);
      }
    }
  };
  round();
  const int64_t pages = bytes_there(window);
  removed.clear();
  holes_punched = 0;
  for (int i = 0; i < 10; ++i) round();
  CHECK(removed.empty());
  CHECK_EQ(holes_punched, 0);
  CHECK_EQ(bytes_there(window), pages);
  CHECK_EQ(*window.offset_of(array.get(), 1), Window::kAlignment);
}

// Arrays leave room for stages; stages may take what arrays have left.
void test_arrays_leave_room_for_stages() {
  const auto windows = check::connected_windows(1, 8 << 20);
  SegmentWindow& window = *windows[0];
  std::vector<std::shared_ptr<std::byte>> arrays;
  while (auto array = window.allocate(1 << 20)) arrays.push_back(array);
  CHECK_EQ(arrays.size(), 5u);
  std::vector<std::shared_ptr<std::byte>> stages;
  stages.push_back(window.allocate_stage(1 << 20));
  stages.push_back(window.allocate_stage(1 << 20));
  CHECK_THROWS(window.allocate_stage(1 << 20), OutOfMemory,
               "needs 1048576 bytes more of the 8388608");
  arrays.clear();
  stages.push_back(window.allocate_stage(1 << 20));
  CHECK(window.offset_of(stages.back().get(), 1 << 20).has_value());
}

// Where the system promises no more than it has, touching a page that it cannot provide would end
// the process: it is requested before.
void test_pages_are_asked_for_before() {
  SegmentWindow window(0, 1, 8 << 20, true);
  const int64_t before = bytes_there(window);
  const auto array = window.allocate(1 << 20);
  const auto stage = window.allocate_stage(1 << 20);
  CHECK(bytes_there(window) - before >= 2 << 20);
  fails_to_allocate = true;
  CHECK(window.allocate(1 << 20) == nullptr);
  CHECK_THROWS(window.allocate_stage(1 << 20), OutOfMemory, "");
  fails_to_allocate = false;
  for (int i = 0; i < 4; ++i) CHECK(window.allocate(4 << 20) != nullptr);
}

// A core dump would be as large as the machine's memory, and allocate all of it.
void test_no_core_dump_holds_it() {
  const auto windows = check::connected_windows(1, 32 << 20);
  const std::byte* const begin = windows[0]->at(0, 0);
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  std::string flags;
  for (bool is_there = false; flags.empty() && std::getline(maps, line);) {
    uint64_t from = 0;
    uint64_t to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
      is_there =
          from <= reinterpret_cast<uintptr_t>(begin) && reinterpret_cast<uintptr_t>(begin) < to;
    }
    if (is_there && line.starts_with("VmFlags:")) flags = line + " ";
  }
  CHECK(flags.find(" dd ") != std::string::npos);
}

void test_kept_until_counted() {
  const auto windows = check::connected_windows(2, 1 << 20);
  std::atomic<uint64_t> counter = 0;
  std::shared_ptr<std::byte> memory = windows[0]->allocate(64);
  const std::weak_ptr<std::byte> look = memory;
  windows[0]->free_once(std::move(memory), counter, 2);
  CHECK(!look.expired());
  counter = 2;
  const auto other = windows[0]->allocate(64);  // whoever needs memory gets what is free by now
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

// Not while it lives, though it may have released its memory.
void test_processes_that_have_ended() {
  int to_parent[2];
  int to_child[2];
  CHECK(pipe(to_parent) == 0 && pipe(to_child) == 0);
  const pid_t child = fork();
  if (child == 0) {
    close(to_child[1]);
    SegmentWindow theirs(1, 2, 1 << 20);
    const Segment::Address address = theirs.address();
    char byte = 0;
    const bool is_told = write(to_parent[1], &address, sizeof(address)) == sizeof(address);
    _exit(is_told && read(to_child[0], &byte, 1) == 0 ? 0 : 1);
  }
  Segment::Address address{};
  CHECK(read(to_parent[0], &address, sizeof(address)) == sizeof(address));
  SegmentWindow window(0, 2, 1 << 20);
  CHECK(window.reach(0, window.address()) && window.reach(1, address));
  CHECK(!window.has_ended(0) && !window.has_ended(1));
  close(to_child[1]);
  siginfo_t info{};
  CHECK(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK(window.has_ended(1));  // nobody has waited for it
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(!window.has_ended(0) && window.has_ended(1));
  for (const int descriptor : {to_parent[0], to_parent[1], to_child[0]}) close(descriptor);
}

// What another rank still uses reads there as before when the window of its owner goes.
void test_what_others_use_stays() {
  constexpr size_t kBytes = 64 << 20;  // beyond what is kept for the next arrays
  auto windows = check::connected_windows(2, 256 << 20);
  std::shared_ptr<std::byte> memory = windows[0]->allocate(kBytes);
  const uint64_t offset = *windows[0]->offset_of(memory.get(), kBytes);
  std::memset(memory.get(), 7, kBytes);
  auto& left = *reinterpret_cast<std::atomic<uint64_t>*>(memory.get());
  left.store(1);
  windows[0]->free_once(std::move(memory), left, 2);
  windows[0].reset();
  CHECK(windows[1]->at(0, offset)[kBytes - 1] == std::byte{7});
}

// A child that releases what it inherited leaves the parent's memory alone.
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

// A thread of its parent may have held it when the child was made: here it does so most of the
// time.
void test_forked_children_wait_for_no_lock() {
  std::atomic<bool> has_ended = false;
  std::thread thread([&] {
    allocates_slowly = true;
    while (!has_ended.load()) Buffer(BlockCache::kSmallestBytes);
  });
  bool is_hanging = false;
  for (int i = 0; i < 20 && !is_hanging; ++i) {
    Buffer inherited(BlockCache::kSmallestBytes);
    sleep_ns(kMillisecond);
    const pid_t child = fork();
    if (child == 0) {
      alarm(2);
      inherited = Buffer();
      Buffer own(BlockCache::kSmallestBytes);
      own.data()[0] = std::byte{1};
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    is_hanging = status != 0;
  }
  has_ended.store(true);
  thread.join();
  CHECK(!is_hanging);
}

// The faster way is chosen, and the other once that is faster; one pair of blocks that says
// otherwise changes nothing, nor does a last part of a block.
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
  test_arrays_are_kept_for_the_next();
  test_freed_memory_is_used_again();
  test_stages_are_kept();
  test_arrays_leave_room_for_stages();
  test_pages_are_asked_for_before();
  test_no_core_dump_holds_it();
  test_kept_until_counted();
  test_other_processes();
  test_processes_that_have_ended();
  test_what_others_use_stays();
  test_forked_children_free_nothing();
  test_forked_children_wait_for_no_lock();
  return check::report();
}

// Broadcast, allgather, alltoall and reduce-scatter among ranks that share memory: arrays there or
// elsewhere, blocks of any length, several works at once.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "ranks.h"
#include "reduce/reduce_many.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 60 * kSecond;
using Memory = std::shared_ptr<std::byte>;

// Which ranks have ordinary arrays.
enum class Ordinary { kNone, kAll, kSome };

// Bytes that are made once: the sanitizers see each that is written.
const std::byte* noise(int rank, size_t bytes) {
  constexpr size_t kMost = 1'300'003;
  static std::array<std::once_flag, 32> made;
  static std::array<std::vector<std::byte>, 32> all;
  std::vector<std::byte>& its = all.at(static_cast<size_t>(rank));
  std::call_once(made.at(static_cast<size_t>(rank)), [&] {
    its.resize(kMost);
    for (size_t i = 0; i < kMost; ++i) {
      its[i] = static_cast<std::byte>((i * 7 + i / 251 + static_cast<size_t>(rank) * 31) % 256);
    }
  });
  CHECK(bytes <= kMost);
  return its.data();
}

struct Bed {
  Driver& driver;
  Ordinary ordinary;

  Memory allocate(size_t bytes) const {
    const bool is_shared =
        ordinary == Ordinary::kNone || (ordinary == Ordinary::kSome && driver.rank() % 3 != 0);
    return is_shared ? driver.allocate(bytes) : ringdl::allocate(bytes);
  }
  Memory noise(int rank, size_t bytes) const {
    Memory memory = allocate(bytes);
    std::memcpy(memory.get(), ::noise(rank, bytes), bytes);
    return memory;
  }
};

void broadcast(const Bed& bed, size_t bytes, int root) {
  Driver& driver = bed.driver;
  const Memory array = bed.noise(driver.rank(), bytes);
  const Call call{Kind::kBroadcast, DType::kUInt8, {}, root, {static_cast<int64_t>(bytes)}, ""};
  driver.wait(driver.submit(call, array.get()), kTimeout);
  CHECK(std::memcmp(array.get(), noise(root, bytes), bytes) == 0);
}

// Every third rank has nothing.
size_t allgather_bytes(int rank, size_t bytes) {
  return rank % 3 == 1 ? 0 : bytes / static_cast<size_t>(1 + rank);
}

void allgathers(const Bed& bed, size_t bytes) {
  Driver& driver = bed.driver;
  const auto length = [&](int rank) { return allgather_bytes(rank, bytes); };
  const size_t own = length(driver.rank());
  const Memory array = bed.noise(driver.rank(), own);
  const Call call{Kind::kAllgather, DType::kUInt8, {}, -1, {static_cast<int64_t>(own)}, ""};
  const auto work = driver.submit(call, array.get());
  driver.wait(work, kTimeout);
  const Gathered& gathered = *work->collective->gathered();
  const std::byte* at = gathered.data.data();
  for (int rank = 0; rank < driver.size(); ++rank) {
    const size_t theirs = length(rank);
    CHECK_EQ(gathered.lengths[static_cast<size_t>(rank)], static_cast<int64_t>(theirs));
    CHECK(theirs == 0 || std::memcmp(at, noise(rank, theirs), theirs) == 0);
    at += theirs;
  }
  CHECK(std::memcmp(array.get(), noise(driver.rank(), own), own) == 0);
}

// Some pairs have nothing for one another; rank 1 gets nothing at all.
void alltoalls(const Bed& bed, size_t bytes) {
  Driver& driver = bed.driver;
  const auto length = [&](int from, int to) {
    return to == 1 || (from + 2 * to) % 4 == 3 ? 0
                                               : bytes / static_cast<size_t>(1 + (from + to) % 3);
  };
  Call call{Kind::kAlltoall, DType::kUInt8, {}, -1, {0}, ""};
  for (int to = 0; to < driver.size(); ++to) {
    call.splits.push_back(static_cast<int64_t>(length(driver.rank(), to)));
    call.shape[0] += call.splits.back();
  }
  const Memory array = bed.noise(driver.rank(), static_cast<size_t>(call.shape[0]));
  const auto work = driver.submit(call, array.get());
  driver.wait(work, kTimeout);
  const Gathered& gathered = *work->collective->gathered();
  const std::byte* at = gathered.data.data();
  for (int from = 0; from < driver.size(); ++from) {
    size_t begin = 0;
    for (int to = 0; to < driver.rank(); ++to) begin += length(from, to);
    const size_t theirs = length(from, driver.rank());
    CHECK_EQ(gathered.lengths[static_cast<size_t>(from)], static_cast<int64_t>(theirs));
    const std::byte* const sent = noise(from, begin + theirs) + begin;
    CHECK(theirs == 0 || std::memcmp(at, sent, theirs) == 0);
    at += theirs;
  }
}

// Numbers that are made once, as many as any call takes.
const std::byte* numbers(int rank, DType dtype) {
  constexpr size_t kMost = 1'300'003;
  static std::array<std::once_flag, 3 * 8> made;
  static std::array<std::vector<std::byte>, 3 * 8> all;
  const size_t kind = dtype == DType::kInt32 ? 0 : dtype == DType::kFloat32 ? 1 : 2;
  const size_t at = 3 * static_cast<size_t>(rank) + kind;
  std::vector<std::byte>& items = all.at(at);
  std::call_once(made.at(at), [&] {
    const size_t item = item_bytes(dtype);
    items.resize(kMost / item * item);
    std::mt19937 random(static_cast<unsigned>(rank));
    for (size_t i = 0; i < items.size(); i += item) {
      const float value = 1.0f / static_cast<float>(1 + random() % 1000);
      const auto integer = static_cast<int32_t>(random() % 1000);
      const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
      if (dtype == DType::kInt32) std::memcpy(items.data() + i, &integer, 4);
      if (dtype == DType::kFloat32) std::memcpy(items.data() + i, bytes, 4);
      if (dtype == DType::kBFloat16) std::memcpy(items.data() + i, bytes + 2, 2);
    }
  });
  return items.data();
}

// Ranks are reduced in their order; rows that ranks cannot share evenly.
void reduce_scatters(const Bed& bed, size_t bytes, DType dtype) {
  Driver& driver = bed.driver;
  const auto size = static_cast<size_t>(driver.size());
  const size_t row = 3 * item_bytes(dtype);
  const size_t rows = bytes / row;
  const Memory array = bed.allocate(rows * row);
  std::memcpy(array.get(), numbers(driver.rank(), dtype), rows * row);
  const auto rank = static_cast<size_t>(driver.rank());
  const size_t begin = row * (rows / size * rank + std::min(rank, rows % size));
  const size_t count = row * (rows / size + (rank < rows % size ? 1 : 0));
  std::vector<std::byte> output(count, std::byte{9});
  Call call{
      Kind::kReduceScatter, dtype, Reduction::kAverage, -1, {static_cast<int64_t>(rows), 3}, ""};
  call.output = output.data();
  driver.wait(driver.submit(call, array.get()), kTimeout);
  std::vector<const std::byte*> sources;
  for (int r = 0; r < driver.size(); ++r) sources.push_back(numbers(r, dtype) + begin);
  std::vector<std::byte> expected(count);
  std::byte* const target = expected.data();
  ReduceMany(dtype, Reduction::kAverage, driver.size())(sources, {&target, 1}, count, false);
  CHECK(output == expected);
}

void every_kind(const Bed& bed, size_t bytes) {
  for (int root = 0; root < bed.driver.size(); ++root) broadcast(bed, bytes, root);
  allgathers(bed, bytes);
  alltoalls(bed, bytes / static_cast<size_t>(bed.driver.size()));
  reduce_scatters(bed, bytes, DType::kFloat32);
  reduce_scatters(bed, bytes, DType::kBFloat16);
}

// Up to several blocks of every rank: those of a stage are 2 * 256 KiB over the number of ranks.
void test_every_kind() {
  for (const int size : {2, 3, 5, 8}) {
    const auto windows = check::connected_windows(size, 32 << 20);
    for (const Ordinary ordinary : {Ordinary::kNone, Ordinary::kAll, Ordinary::kSome}) {
      for (const uint64_t delay_seed : {0u, 5u}) {
        check::run_ranks(size, {}, {4096, delay_seed}, [&](Driver& driver) {
          const auto rank = static_cast<size_t>(driver.rank());
          driver.set_window(windows[rank], std::vector<int>(static_cast<size_t>(size), 0));
          const Bed bed{driver, ordinary};
          for (const size_t bytes : {0, 1, 5000, 100'001, 1'300'003}) every_kind(bed, bytes);
          const auto stats = driver.stats();
          CHECK_EQ(stats.at("data_messages_sent"), 0.0);
        });
      }
    }
  }
}

// What calls need for themselves is not taken from the room for arrays.
void test_no_room_for_arrays() {
  const auto windows = check::connected_windows(2, 16 << 20);
  check::run_ranks(2, {}, {}, [&](Driver& driver) {
    const auto& window = windows[static_cast<size_t>(driver.rank())];
    driver.set_window(window, {0, 0});
    std::vector<Memory> all;
    for (size_t bytes = 8 << 20; bytes >= Window::kAlignment; bytes /= 2) {
      while (Memory memory = window->allocate(bytes)) all.push_back(std::move(memory));
    }
    every_kind({driver, Ordinary::kAll}, 100'000);
  });
}

// Works are submitted at any time and waited for in any order.
void test_many_at_once() {
  constexpr int kSize = 4;
  constexpr int kWorks = 24;
  constexpr size_t kBytes = 300'000;
  const auto windows = check::connected_windows(kSize, 64 << 20);
  check::run_ranks(kSize, {}, {4096, 3}, [&](Driver& driver) {
    const auto rank = static_cast<size_t>(driver.rank());
    driver.set_window(windows[rank], std::vector<int>(kSize, 0));
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int round = 0; round < 3; ++round) {
      std::vector<int> order(kWorks);
      for (int i = 0; i < kWorks; ++i) order[static_cast<size_t>(i)] = i;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<Memory> arrays(kWorks);
      std::vector<std::shared_ptr<Work>> works(kWorks);
      for (const int i : order) {
        const Bed bed{driver, i % 2 == 0 ? Ordinary::kSome : Ordinary::kAll};
        const auto n = static_cast<size_t>(i);
        arrays[n] = bed.noise(driver.rank() + i, kBytes);
        Call call{Kind::kBroadcast, DType::kUInt8, {}, i % kSize, {kBytes}, std::to_string(i)};
        if (i % 3 == 0) call.kind = Kind::kAllgather;
        if (i % 3 == 0) call.root = -1;
        if (random() % 4 == 0) sleep_ns(static_cast<int64_t>(random() % 1000) * kMicrosecond);
        works[n] = driver.submit(call, arrays[n].get());
      }
      std::shuffle(order.begin(), order.end(), random);
      for (const int i : order) {
        const auto n = static_cast<size_t>(i);
        driver.wait(works[n], kTimeout);
        if (i % 3 != 0) {
          CHECK(std::memcmp(arrays[n].get(), noise(i % kSize + i, kBytes), kBytes) == 0);
          continue;
        }
        const std::byte* at = works[n]->collective->gathered()->data.data();
        for (int other = 0; other < kSize; ++other, at += kBytes) {
          CHECK(std::memcmp(at, noise(other + i, kBytes), kBytes) == 0);
        }
      }
    }
  });
}

// Counts the bytes that leave each host.
class Metered final : public Transport {
 public:
  using Meters = std::vector<std::atomic<int64_t>>;
  Metered(std::unique_ptr<Transport> below, const std::vector<int>& hosts, Meters& left)
      : below_(std::move(below)), hosts_(hosts), left_(left) {}
  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  int max_tag() const override { return below_->max_tag(); }
  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    const int host = hosts_[static_cast<size_t>(rank())];
    if (hosts_[static_cast<size_t>(to)] != host) left_[static_cast<size_t>(host)] += bytes;
    return below_->send(to, tag, data, bytes, owner);
  }
  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    return below_->receive(from, tag, data, bytes, owner);
  }
  int poll() override { return below_->poll(); }
  bool withdraw(Ticket receive) override { return below_->withdraw(receive); }

 private:
  std::unique_ptr<Transport> below_;
  const std::vector<int>& hosts_;
  Meters& left_;
};

// Each byte is sent between hosts once, however ranks are placed on them.
void test_several_hosts() {
  constexpr size_t kBytes = 600'000;
  constexpr int64_t kHeaders = 60'000;  // at most, and what else is not payload
  const std::vector<std::vector<int>> layouts = {{0, 1, 0, 1}, {0, 1, 2, 0, 1, 2},
                                                 {0, 0, 1, 1}, {0, 0, 0, 1},
                                                 {1, 0, 0, 1}, {0, 1, 1, 2, 2, 2}};
  const std::vector<std::function<void(const Bed&)>> kinds = {
      [](const Bed& bed) { allgathers(bed, kBytes); },
      [](const Bed& bed) { reduce_scatters(bed, kBytes, DType::kInt32); },
      [](const Bed& bed) { broadcast(bed, kBytes, 1); },
      [](const Bed& bed) { broadcast(bed, kBytes, bed.driver.size() - 1); },
      [](const Bed& bed) {
        for (const size_t bytes : {0, 1, 5'000}) {
          for (int root = 0; root < bed.driver.size(); ++root) broadcast(bed, bytes, root);
          allgathers(bed, bytes);
          alltoalls(bed, bytes);
          reduce_scatters(bed, bytes, DType::kInt32);
        }
      },
  };
  for (const auto& hosts : layouts) {
    const int size = static_cast<int>(hosts.size());
    const auto host_count = static_cast<size_t>(*std::ranges::max_element(hosts) + 1);
    const bool are_even = std::ranges::count(hosts, 0) * static_cast<int64_t>(host_count) == size &&
                          std::ranges::count(hosts, 1) * static_cast<int64_t>(host_count) == size;
    const auto windows = check::connected_windows(hosts, 32 << 20);
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      Metered::Meters left(3);
      check::run_drivers(
          size, {}, {},
          [&](const std::shared_ptr<Driver>& driver) {
            const auto rank = static_cast<size_t>(driver->rank());
            driver->set_window(windows[rank], hosts);
            kinds[kind]({*driver, Ordinary::kSome});
          },
          [&](std::unique_ptr<Transport> below) {
            return std::make_unique<Metered>(std::move(below), hosts, left);
          });
      if (kind > 3) continue;  // many small ones
      for (size_t host = 0; host < host_count; ++host) {
        size_t most = kBytes;
        if (kind == 1 && are_even) most = kBytes / host_count * (host_count - 1);
        if (kind == 0) {  // all but the next host's, or the next rank's, which may be empty
          most = 0;
          for (int rank = 0; rank < size; ++rank) {
            const auto place = static_cast<size_t>(hosts[static_cast<size_t>(rank)]);
            const bool is_next = place == (host + 1) % host_count;
            most += are_even && is_next ? 0 : allgather_bytes(rank, kBytes);
          }
        }
        CHECK(left[host].load() <= static_cast<int64_t>(most) + kHeaders);
      }
    }
  }
}

// On every rank, also on those of other hosts.
void test_disagreements() {
  for (const std::vector<int>& hosts :
       std::vector<std::vector<int>>{{0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 1}}) {
    const auto windows = check::connected_windows(hosts, 16 << 20);
    check::run_ranks(4, {}, {4096, 1}, [&](Driver& driver) {
      const auto rank = static_cast<size_t>(driver.rank());
      driver.set_window(windows[rank], hosts);
      const Memory array = driver.allocate(400'000);
      std::vector<std::byte> output(400'000);
      for (int wrong = 0; wrong < 4; ++wrong) {
        for (const Kind kind : {Kind::kBroadcast, Kind::kAllgather, Kind::kReduceScatter}) {
          const int64_t columns = driver.rank() == wrong ? 4 : 5;
          const int root = kind == Kind::kBroadcast ? 0 : -1;
          Call call{kind, DType::kFloat32, Reduction::kSum, root, {20'000, columns}, "call"};
          call.output = output.data();
          CHECK_THROWS(driver.wait(driver.submit(call, array.get()), kTimeout), MismatchError,
                       "disagree on");
        }
      }
    });
  }
}

// The others are notified, whether they have met that rank's neighbours or not.
void test_a_rank_that_leaves() {
  constexpr int kSize = 3;
  const auto windows = check::connected_windows(kSize, 16 << 20);
  for (int leaver = 0; leaver < kSize; ++leaver) {
    check::run_ranks(kSize, {}, {4096, 9}, [&](Driver& driver) {
      const auto rank = static_cast<size_t>(driver.rank());
      driver.set_window(windows[rank], std::vector<int>(kSize, 0));
      if (driver.rank() == leaver) return;
      const Memory array = driver.allocate(100'000);
      for (const Kind kind : {Kind::kBroadcast, Kind::kAllgather}) {
        const Call call{kind, DType::kUInt8, {}, kind == Kind::kBroadcast ? 0 : -1, {100'000}, ""};
        const auto work = driver.submit(call, array.get());
        CHECK_THROWS(driver.wait(work, kTimeout), MismatchError,
                     "rank " + std::to_string(leaver) + " has shut down without submitting");
      }
    });
  }
}

}  // namespace

int main() {
  test_every_kind();
  test_no_room_for_arrays();
  test_many_at_once();
  test_several_hosts();
  test_disagreements();
  test_a_rank_that_leaves();
  return check::report();
}

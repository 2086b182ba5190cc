#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/device/library_allreduce.h"
#include "engine/backoff.h"
#include "engine/driver.h"
#include "engine/gradient_buckets.h"
#include "pretended_device.h"
#include "sockets.h"
#include "transport/loopback/loopback.h"
#include "transport/shm/segment_window.h"

namespace ringdl::check {

/// Windows for the ranks of one process, each of which reaches those of its host; null where no
/// other rank is.
inline std::vector<std::shared_ptr<SegmentWindow>> connected_windows(const std::vector<int>& hosts,
                                                                     size_t bytes) {
  const int size = static_cast<int>(hosts.size());
  std::vector<std::shared_ptr<SegmentWindow>> windows;
  for (int rank = 0; rank < size; ++rank) {
    const auto local = std::ranges::count(hosts, hosts[static_cast<size_t>(rank)]);
    const bool is_alone = size > 1 && local == 1;
    windows.push_back(is_alone ? nullptr : std::make_shared<SegmentWindow>(rank, size, bytes));
  }
  for (size_t a = 0; a < hosts.size(); ++a) {
    for (size_t b = 0; b < hosts.size(); ++b) {
      if (hosts[a] != hosts[b] || !windows[a]) continue;
      CHECK(windows[a]->reach(static_cast<int>(b), windows[b]->address()));
    }
  }
  return windows;
}

/// The same with all ranks on one host.
inline std::vector<std::shared_ptr<SegmentWindow>> connected_windows(int size, size_t bytes) {
  return connected_windows(std::vector<int>(static_cast<size_t>(size), 0), bytes);
}

/// Collective: by rank, what each passes: as many numbers on all.
inline BucketMemory::ByMember exchange(Driver& driver, std::vector<int64_t> own) {
  BucketMemory::ByMember all;
  Call call;
  call.kind = Kind::kAllgather;
  call.dtype = DType::kInt64;
  call.shape = {1, static_cast<int64_t>(own.size())};
  const auto work = driver.submit(call, own.data());
  driver.wait(work, std::numeric_limits<int64_t>::max() / 2);
  const auto* row = reinterpret_cast<const int64_t*>(work->collective->gathered()->data.data());
  for (int rank = 0; rank < driver.size(); ++rank, row += own.size()) {
    all.emplace_back(row, row + own.size());
  }
  return all;
}

/// Collective: makes buckets, and announces to all ranks where they are.
inline std::unique_ptr<GradientBuckets> make_buckets(const std::shared_ptr<Driver>& driver,
                                                     const std::vector<GradientSpec>& specs,
                                                     BucketPlan plan, int64_t first_number = 0,
                                                     Reduction reduction = Reduction::kSum,
                                                     Memory where = {}) {
  const SharedGroup& group = driver->group_of_all_ranks();
  auto memory = std::make_unique<BucketMemory>(*driver, plan, group, where);
  auto way = BucketMemory::Way::kHere;
  bool is_by_library = false;
  if (const auto own = memory->library_member()) {
    std::vector<DeviceLibrary::Member> members;
    for (const auto& its : exchange(*driver, {own->device[0], own->device[1], own->state})) {
      members.push_back({{its[0], its[1]}, its[2]});
    }
    is_by_library = why_no_library(members).empty();
  }
  if (is_by_library) {
    way = BucketMemory::Way::kByLibrary;
  } else if (const auto place = memory->place_on_device(); !place.empty()) {
    const bool is_reached = memory->reach(exchange(*driver, place));
    const auto reached = exchange(*driver, {is_reached ? 1 : 0});
    CHECK(std::ranges::all_of(reached, [](const auto& its) { return its[0] == 1; }));
    way = BucketMemory::Way::kDirect;
  }
  memory->settle(way);
  BucketMemory::ByMember places;
  if (!memory->places().empty()) places = exchange(*driver, memory->places());
  return std::make_unique<GradientBuckets>(driver, specs, std::move(plan), std::move(memory),
                                           places, reduction, first_number, group);
}

using DriverBody = std::function<void(const std::shared_ptr<Driver>&)>;
using TransportWrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

inline bool is_set(const char* variable, const char* value) {
  const char* const wanted = std::getenv(variable);
  return wanted != nullptr && std::string(wanted) == value;
}

/// Where arrays are said to lie: on a device where RINGDL_TEST_MEMORY=device, which is a pretended
/// one.
inline Memory memory_of_tests() {
  return is_set("RINGDL_TEST_MEMORY", "device") ? Memory{MemoryKind::kDevice, 0} : Memory{};
}

/// One device for each rank, in ordinary memory.
class PretendedDevices final : public DeviceExecutors {
 public:
  explicit PretendedDevices(uint64_t seed) : first_(seed), second_(seed + 1000) {}
  Executor& of(int) override { return first_; }
  Executor& second_of(int) override { return second_; }
  std::unique_ptr<Mark> mark(int, void*) override {
    struct Later final : Mark {
      bool is_passed() override { return asked++ > 1; }
      int asked = 0;
    };
    return std::make_unique<Later>();
  }
  void synchronize() override {}
  void use_no_peers() override {}
  bool packs(int) override { return false; }
  void pack(int, void*, const Packing&, std::span<const PackItem>) override {}
  std::shared_ptr<uint64_t> counter(int) override { return std::make_shared<uint64_t>(0); }
  std::shared_ptr<std::byte> allocate(int, size_t bytes) override {
    const auto memory = ringdl::allocate(bytes);
    std::memset(memory.get(), 0, bytes);
    allocated_.push_back({memory.get(), bytes});
    return memory;
  }
  std::shared_ptr<std::byte> pinned(int, size_t bytes, const Allocate& allocate) override {
    return allocate(bytes);
  }
  std::shared_ptr<std::byte> stage(int, size_t bytes, const Allocate& allocate) override {
    return allocate(bytes);
  }
  std::shared_ptr<std::byte> device_stage(int device, size_t bytes) override {
    return allocate(device, bytes);
  }
  DevicePlace place_of(int, const std::byte* data, size_t bytes) override {
    const bool is_inside = std::ranges::any_of(allocated_, [&](const auto& memory) {
      return data >= memory.data() && data + bytes <= memory.data() + memory.size();
    });
    DevicePlace place;
    if (is_inside) place.words[0] = reinterpret_cast<int64_t>(data);
    return place;
  }
  std::byte* reached(int, const DevicePlace& place) override {
    return reinterpret_cast<std::byte*>(place.words[0]);
  }
  void keep(std::shared_ptr<std::byte>) override {}
  void let_go() override {}
  bool has_custom(int, CustomKernel) override { return false; }
  void close_libraries() override {}
  bool library_reduces(DType, Reduction) override { return false; }
  DeviceLibrary& library(uint64_t, int, int, int) override { throw Error("there is none"); }

 private:
  PretendedDevice first_, second_;
  std::vector<std::span<const std::byte>> allocated_;
};

/// Messages through memory, or through sockets where RINGDL_TEST_TRANSPORT=tcp, whatever the
/// options.
inline std::vector<std::unique_ptr<Transport>> make_transports(int size, LoopbackOptions options) {
  return is_set("RINGDL_TEST_TRANSPORT", "tcp") ? make_tcp(size) : make_loopback(size, options);
}

/// Runs `body` on `size` ranks, each a thread with an engine of its own, and shuts them down. Where
/// RINGDL_TEST_EXECUTOR=device, all that they copy and reduce happens later.
/// An exception on one rank is a failed check.
/// @param wrap  if given, puts something between each rank's engine and its transport
/// @param make_devices  the devices of a rank, by default pretended ones
inline void run_drivers(
    int size, EngineOptions options, LoopbackOptions loopback, const DriverBody& body,
    const TransportWrap& wrap = {},
    const std::function<std::shared_ptr<DeviceExecutors>(int rank)>& make_devices = [](int rank) {
      return std::make_shared<PretendedDevices>(static_cast<uint64_t>(rank));
    }) {
  auto transports = make_transports(size, loopback);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Transport> transport = std::move(transports[static_cast<size_t>(rank)]);
      if (wrap) transport = wrap(std::move(transport));
      PretendedDevice device(static_cast<uint64_t>(rank));
      EngineOptions own = options;
      if (is_set("RINGDL_TEST_EXECUTOR", "device")) own.executor = &device;
      own.devices = make_devices(rank);
      own.slab_bytes = 16 << 10;  // so that arrays of tests have several
      const std::shared_ptr<Driver> driver = make_driver(std::move(transport), own);
      const auto attempt = [&](const std::function<void()>& act) {
        try {
          act();
        } catch (const std::exception& error) {
          record(false, __FILE__, __LINE__,
                 "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     " threw: " + error.what());
        }
      };
      attempt([&] { body(driver); });
      attempt([&] { driver->shutdown(); });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// The same for a body that only needs the engine itself.
inline void run_ranks(int size, EngineOptions options, LoopbackOptions loopback,
                      const std::function<void(Driver&)>& body) {
  run_drivers(size, options, loopback,
              [&](const std::shared_ptr<Driver>& driver) { body(*driver); });
}

}  // namespace ringdl::check

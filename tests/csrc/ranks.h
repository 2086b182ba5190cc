#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
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

/// Collective: makes buckets, and announces their places to all ranks if they share memory.
inline std::unique_ptr<GradientBuckets> make_buckets(const std::shared_ptr<Driver>& driver,
                                                     const std::vector<GradientSpec>& specs,
                                                     BucketPlan plan, int64_t first_number = 0,
                                                     Reduction reduction = Reduction::kSum) {
  const SharedGroup& group = driver->group_of_all_ranks();
  auto memory = std::make_unique<BucketMemory>(*driver, plan, group);
  std::vector<int64_t> own = memory->places();
  BucketMemory::Places places;
  if (!own.empty()) {
    Call call;
    call.kind = Kind::kAllgather;
    call.dtype = DType::kInt64;
    call.shape = {1, static_cast<int64_t>(own.size())};
    const auto work = driver->submit(call, own.data());
    driver->wait(work, std::numeric_limits<int64_t>::max() / 2);
    const auto* all = reinterpret_cast<const int64_t*>(work->collective->gathered()->data.data());
    for (int rank = 0; rank < driver->size(); ++rank, all += own.size()) {
      places.emplace_back(all, all + own.size());
    }
  }
  return std::make_unique<GradientBuckets>(driver, specs, std::move(plan), std::move(memory),
                                           places, reduction, first_number, group);
}

using DriverBody = std::function<void(const std::shared_ptr<Driver>&)>;
using TransportWrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

inline bool is_set(const char* variable, const char* value) {
  const char* const wanted = std::getenv(variable);
  return wanted != nullptr && std::string(wanted) == value;
}

/// Messages through memory, or through sockets where RINGDL_TEST_TRANSPORT=tcp, whatever the
/// options.
inline std::vector<std::unique_ptr<Transport>> make_transports(int size, LoopbackOptions options) {
  return is_set("RINGDL_TEST_TRANSPORT", "tcp") ? make_tcp(size) : make_loopback(size, options);
}

/// Runs `body` on `size` ranks, each a thread with an engine of its own, and shuts them down. Where
/// RINGDL_TEST_EXECUTOR=device, all that they copy and reduce happens later.
/// An exception on one rank is a failed check.
/// @param wrap  if given, puts something between each rank's engine and its transport
inline void run_drivers(int size, EngineOptions options, LoopbackOptions loopback,
                        const DriverBody& body, const TransportWrap& wrap = {}) {
  auto transports = make_transports(size, loopback);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Transport> transport = std::move(transports[static_cast<size_t>(rank)]);
      if (wrap) transport = wrap(std::move(transport));
      PretendedDevice device(static_cast<uint64_t>(rank));
      EngineOptions own = options;
      if (is_set("RINGDL_TEST_EXECUTOR", "device")) own.executor = &device;
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

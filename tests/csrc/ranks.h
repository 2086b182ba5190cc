#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "transport/loopback/loopback.h"

namespace ringdl::check {

using EngineBody = std::function<void(const std::shared_ptr<Engine>&)>;
using TransportWrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

/// Runs `body` on `size` ranks, each a thread with an engine of its own, and shuts them down.
/// An exception on one rank is a failed check.
/// @param wrap  if given, puts something between each rank's engine and its transport
inline void run_engines(int size, EngineOptions options, LoopbackOptions loopback,
                        const EngineBody& body, const TransportWrap& wrap = {}) {
  auto transports = make_loopback(size, loopback);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Transport> transport = std::move(transports[static_cast<size_t>(rank)]);
      if (wrap) transport = wrap(std::move(transport));
      const std::shared_ptr<Engine> engine = make_engine(std::move(transport), options);
      const auto attempt = [&](const std::function<void()>& act) {
        try {
          act();
        } catch (const std::exception& error) {
          record(false, __FILE__, __LINE__,
                 "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     " threw: " + error.what());
        }
      };
      attempt([&] { body(engine); });
      attempt([&] { engine->shutdown(); });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// The same for a body that only needs the engine itself.
inline void run_ranks(int size, EngineOptions options, LoopbackOptions loopback,
                      const std::function<void(Engine&)>& body) {
  run_engines(size, options, loopback,
              [&](const std::shared_ptr<Engine>& engine) { body(*engine); });
}

}  // namespace ringdl::check

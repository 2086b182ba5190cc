#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/loopback/loopback.h"

namespace ringdl::check {

/// A clock that the test moves.
class TestClock final : public Clock {
 public:
  int64_t now_ns() const override { return now_ns_; }
  void advance(int64_t ns) { now_ns_ += ns; }

 private:
  int64_t now_ns_ = kSecond;
};

/// Engines of one process, polled one after the other under a test's clock.
class Cluster {
 public:
  explicit Cluster(int size) {
    for (auto& transport : make_loopback(size)) {
      engines_.push_back(std::make_unique<Engine>(std::move(transport), EngineOptions{}, clock_));
    }
  }

  std::string said;  // what they would have printed

  TestClock& clock() { return clock_; }
  int size() const { return static_cast<int>(engines_.size()); }
  Engine& operator[](int rank) { return *engines_[static_cast<size_t>(rank)]; }

  void for_each(const std::function<void(Engine&)>& act) {
    for (const auto& engine : engines_) act(*engine);
  }

  /// Polls all until `done`; each round advances the clock by `step_ns`.
  /// @returns whether it was done within `time_ns`
  bool poll_until(const std::function<bool()>& done, int64_t time_ns = kSecond,
                  int64_t step_ns = kMicrosecond) {
    const int64_t end = clock_.now_ns() + time_ns;
    while (!done() && clock_.now_ns() < end) {
      clock_.advance(step_ns);
      for_each([this](Engine& engine) {
        engine.poll();
        said += engine.watch_over(clock_.now_ns());
      });
    }
    return done();
  }

  bool finish(const std::vector<std::shared_ptr<Work>>& works) {
    return poll_until(
        [&] { return std::ranges::all_of(works, [](const auto& work) { return work->ended(); }); });
  }

 private:
  TestClock clock_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

}  // namespace ringdl::check

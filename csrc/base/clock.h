#pragma once

#include <time.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace ringdl {

constexpr int64_t kMicrosecond = 1'000;
constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;

/// For messages: "0.3 s".
inline std::string seconds_text(int64_t ns) {
  return std::to_string(ns / kSecond) + "." + std::to_string(ns / (kSecond / 10) % 10) + " s";
}

/// Nanoseconds of the machine's monotone clock. Threads that wait and transports read it; the
/// engine is handed a Clock, and collectives read none.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The same clock as of its last tick, some milliseconds ago at most; takes a fourth of the time.
inline int64_t coarse_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

/// An engine's source of time: the machine's clock, a test's or a simulator's.
class Clock {
 public:
  /// Nanoseconds since some instant; never less than before.
  virtual int64_t now_ns() const = 0;

 protected:
  ~Clock() = default;
};

/// The machine's monotone clock.
class MonotonicClock final : public Clock {
 public:
  int64_t now_ns() const override { return ringdl::now_ns(); }
};

inline constexpr MonotonicClock kMonotonicClock;

/// CPU time that the calling thread has used, in nanoseconds.
inline int64_t thread_cpu_ns() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return used.tv_sec * kSecond + used.tv_nsec;
}

}  // namespace ringdl

#pragma once

#include <chrono>
#include <cstdint>

namespace ringdl {

/// Nanoseconds of a monotone clock. Only the engine reads it; collectives never do.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

constexpr int64_t kMicrosecond = 1'000;
constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;

}  // namespace ringdl

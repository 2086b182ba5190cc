#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace ringdl {

/// Whose fault it is, and so which error waits raise. The values travel in messages.
enum class FailureKind : uint8_t {
  kMismatch = 0,    // ranks disagree, or one left
  kUsage = 1,       // it would have failed whatever the others did
  kRankFailed = 2,  // a rank that takes part has failed
  kDevice = 3,      // a device of a rank that takes part has failed
  kMemory = 4,      // a rank that takes part has not enough
};

/// Why a work fails on all ranks.
struct Failure {
  std::string text;  // empty: it does not fail
  FailureKind kind = FailureKind::kMismatch;
  uint64_t joins = 0;  // how often all ranks had joined before it was submitted

  explicit operator bool() const { return !text.empty(); }

  /// @throws UsageError, MismatchError, RankFailedError, DeviceError, OutOfMemory
  [[noreturn]] void raise() const {
    switch (kind) {
      case FailureKind::kUsage:
        throw UsageError(text);
      case FailureKind::kRankFailed:
        throw RankFailedError(text);
      case FailureKind::kDevice:
        throw DeviceError(text);
      case FailureKind::kMemory:
        throw OutOfMemory(text);
      case FailureKind::kMismatch:
        break;
    }
    throw MismatchError(text);
  }
};

}  // namespace ringdl

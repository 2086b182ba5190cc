#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace ringdl {

/// Why a work fails on all ranks.
struct Failure {
  std::string text;       // empty: it does not
  bool is_usage = false;  // it could not have ended well whatever the others did
  uint64_t joins = 0;     // how often all ranks had joined before it was submitted

  explicit operator bool() const { return !text.empty(); }

  /// @throws UsageError, MismatchError
  [[noreturn]] void raise() const {
    if (is_usage) throw UsageError(text);
    throw MismatchError(text);
  }
};

}  // namespace ringdl

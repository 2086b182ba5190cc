#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace ringdl {

/// How many of `count` floats are infinite or NaN; none of integers are.
uint64_t count_non_finite(DType dtype, const std::byte* data, size_t count);

}  // namespace ringdl

#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "reduce/reduce.h"

namespace ringdl {

/// Fills an array with what changes nothing when it is reduced with others: 0 for sums and averages
/// (of bool: for sums), 1 for products, the least value for max, the greatest for min, all bits for
/// a bitwise and, none for or and xor. Zeros of floats are -0 in sums, which alone leave -0 as it
/// is.
void fill_neutral(DType dtype, Reduction reduction, void* data, size_t count);

}  // namespace ringdl

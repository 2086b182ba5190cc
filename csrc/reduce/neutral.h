#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "reduce/reduce.h"

namespace ringdl {

/// Fills an array with the neutral element of a reduction: 0 for sums and averages (of bool: for
/// sums), 1 for products, the least value for max, the greatest for min, all bits for a bitwise
/// and, none for or and xor. In sums of floats it is -0, the only zero that leaves -0 unchanged.
void fill_neutral(DType dtype, Reduction reduction, void* data, size_t count);

}  // namespace ringdl

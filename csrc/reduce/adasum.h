#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "reduce/reduce.h"

namespace ringdl {

/// Distinguishes the kernels of find_adasum() from user-defined reductions.
inline constexpr uint64_t kAdasumDigest = 0x41646173756d0001u;

/// into = (1 - <into, from> / (2 |into|^2)) into + (1 - <into, from> / (2 |from|^2)) from, over all
/// `count` elements as vectors: the sum of orthogonal ones, the average of parallel ones (Maleki et
/// al. 2021, "Scaling Distributed Training with Adaptive Summation"). A zero vector adds nothing.
/// Products are summed in float64, in an order that depends on `count` alone. Combining parts of
/// arrays gives another result.
/// @returns  null for dtypes that are not floating
CustomKernel find_adasum(DType dtype);

}  // namespace ringdl

#pragma once

#include "reduce/reduce.h"

namespace ringdl {

/// The same kernels, compiled once per instruction set from kernels.inc. Call one only where its
/// instruction set runs (detect_simd_level()); all but the baseline exist on x86-64 only.
Kernels find_kernels_baseline(DType dtype, Reduction reduction);
Kernels find_kernels_avx2(DType dtype, Reduction reduction);
Kernels find_kernels_avx512(DType dtype, Reduction reduction);
Widening find_widening_baseline(DType dtype);
Widening find_widening_avx2(DType dtype);
Widening find_widening_avx512(DType dtype);

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "reduce/reduction.h"

namespace ringdl {

inline constexpr int kReductionCount = 8;

constexpr std::string_view name_of(Reduction reduction) {
  constexpr std::string_view names[kReductionCount] = {
      "sum", "average", "min", "max", "product", "bitwise and", "bitwise or", "bitwise xor"};
  return names[static_cast<int>(reduction)];
}

/// Whether a dtype has this reduction: all but the bitwise ones of floats.
constexpr bool has_reduction(DType dtype, Reduction reduction) {
  return reduction < Reduction::kBitAnd || !is_floating(dtype);
}

/// The reduction in all but the last of several steps: averages divide once.
constexpr Reduction undivided(DType dtype, Reduction reduction) {
  if (reduction != Reduction::kAverage) return reduction;
  return dtype == DType::kBool ? Reduction::kProduct : Reduction::kSum;
}

/// Instruction sets that kernels are compiled for. All levels give the same bits.
enum class SimdLevel : uint8_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

/// The widest level that this processor and its operating system run.
SimdLevel detect_simd_level();
std::string_view name_of(SimdLevel level);

/// into[i] = into[i] ∘ from[i] for `count` elements. The arrays do not overlap; any alignment that
/// the dtype itself needs will do. 16-bit floats are combined in fp32 and rounded to nearest even;
/// integers wrap; bool: any byte but 0 is true, sum and max are or, product and min are and, and
/// results are 0 or 1. Min and max propagate NaN and put -0 below +0. A resulting NaN is always the
/// positive quiet one without payload. Expects the calling thread to round to nearest and not to
/// flush subnormals.
using CombineKernel = void (*)(void* into, const void* from, size_t count);

/// into[i] = (into[i] ∘ from[i]) / divisor, where only the average divides: floats are divided and
/// rounded once, integers truncate towards zero after the (wrapping) sum, and the average of bool
/// is and. For all other reductions `divisor` is ignored and this equals CombineKernel.
using FinishKernel = void (*)(void* into, const void* from, size_t count, int64_t divisor);

/// A user-defined reduction, compiled elsewhere: like CombineKernel, for one dtype. It must not
/// throw, and may be called by any thread.
using CustomKernel = void (*)(void* into, const void* from, int64_t count);

struct Kernels {
  CombineKernel combine;
  FinishKernel finish;
};

/// 16-bit floats to fp32, and back: rounded to nearest even, every NaN the positive quiet one.
struct Widening {
  void (*widen)(float* wide, const void* narrow, size_t count);
  void (*narrow)(void* narrow, const float* wide, size_t count);
};

/// The kernels for one dtype and reduction. Pure, thread-safe, never fails.
/// @param level  at most detect_simd_level()
Kernels find_kernels(DType dtype, Reduction reduction, SimdLevel level = detect_simd_level());

/// @param dtype  float16 or bfloat16
Widening find_widening(DType dtype, SimdLevel level = detect_simd_level());

}  // namespace ringdl

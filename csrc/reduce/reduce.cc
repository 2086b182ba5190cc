#include "reduce/reduce.h"

#include "reduce/kernels.h"

namespace ringdl {

#ifdef RINGDL_X86

namespace {

// GCC's answers include whether the operating system saves the registers (XGETBV).
SimdLevel ask_processor() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) {
    return SimdLevel::kBaseline;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? SimdLevel::kAvx512 : SimdLevel::kAvx2;
}

}  // namespace

SimdLevel detect_simd_level() {
  static const SimdLevel level = ask_processor();
  return level;
}

Kernels find_kernels(DType dtype, Reduction reduction, SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512:
      return find_kernels_avx512(dtype, reduction);
    case SimdLevel::kAvx2:
      return find_kernels_avx2(dtype, reduction);
    case SimdLevel::kBaseline:
      break;
  }
  return find_kernels_baseline(dtype, reduction);
}

Widening find_widening(DType dtype, SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512:
      return find_widening_avx512(dtype);
    case SimdLevel::kAvx2:
      return find_widening_avx2(dtype);
    case SimdLevel::kBaseline:
      break;
  }
  return find_widening_baseline(dtype);
}

#else

SimdLevel detect_simd_level() { return SimdLevel::kBaseline; }

Widening find_widening(DType dtype, SimdLevel) { return find_widening_baseline(dtype); }

Kernels find_kernels(DType dtype, Reduction reduction, SimdLevel) {
  return find_kernels_baseline(dtype, reduction);
}

#endif

std::string_view name_of(SimdLevel level) {
  constexpr std::string_view names[] = {"baseline", "avx2", "avx512"};
  return names[static_cast<int>(level)];
}

}  // namespace ringdl

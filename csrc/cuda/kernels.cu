// The kernels, for nvcc and for NVRTC. See kernels.inc.
#define RINGDL_HD __host__ __device__
#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint32_t = unsigned;
using uint64_t = unsigned long;
#else
#include <cstdint>
#endif

#include "cuda/kernels.h"
#include "reduce/reduction.h"
#include "cuda/kernels.inc"

#define RINGDL_GLOBAL(name, Arguments, body)                                              \
  extern "C" __global__ void name(const Arguments its) {                                  \
    const unsigned long long block = blockIdx.x;                                          \
    body(its, block * blockDim.x + threadIdx.x,                                           \
         static_cast<unsigned long long>(gridDim.x) * blockDim.x);                        \
  }
RINGDL_KERNELS(RINGDL_GLOBAL)

#define RINGDL_FIND_KERNELS find_kernels_avx512
#define RINGDL_FIND_WIDENING find_widening_avx512
#include "reduce/kernels.inc"

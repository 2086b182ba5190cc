#define RINGDL_FIND_KERNELS find_kernels_avx2
#define RINGDL_FIND_WIDENING find_widening_avx2
#include "reduce/kernels.inc"

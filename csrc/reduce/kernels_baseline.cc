#define RINGDL_FIND_KERNELS find_kernels_baseline
#include "reduce/kernels.inc"

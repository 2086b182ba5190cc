#define RINGDL_FIND_KERNELS find_kernels_baseline
#define RINGDL_FIND_WIDENING find_widening_baseline
#include "reduce/kernels.inc"

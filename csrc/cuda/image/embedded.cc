#include "cuda/kernel_image.h"

// RINGDL_KERNELS is the path of the fatbin that nvcc has made of kernels.cu.
asm(R"(
  .section .rodata
  .balign 16
  .global ringdl_kernel_image
  .hidden ringdl_kernel_image
ringdl_kernel_image:
  .incbin ")" RINGDL_KERNELS R"("
  .previous
)");

extern "C" const char ringdl_kernel_image[];

namespace ringdl::cuda {

const void* kernel_image() { return ringdl_kernel_image; }

}  // namespace ringdl::cuda

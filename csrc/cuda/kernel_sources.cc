#include "cuda/kernel_image.h"

// RINGDL_SOURCES is the path of csrc.
#define RINGDL_EMBED(name, file)                             \
  asm(".section .rodata\n"                                   \
      ".hidden " #name "\n.global " #name "\n" #name         \
      ":\n"                                                  \
      ".incbin \"" RINGDL_SOURCES "/" file                   \
      "\"\n"                                                 \
      ".hidden " #name "_end\n.global " #name "_end\n" #name \
      "_end:\n"                                              \
      ".byte 0\n"                                            \
      ".previous\n");                                        \
  extern "C" const char name[];                              \
  extern "C" const char name##_end[];

RINGDL_EMBED(ringdl_text_kernels, "cuda/kernels.cu")
RINGDL_EMBED(ringdl_text_arguments, "cuda/kernels.h")
RINGDL_EMBED(ringdl_text_reduction, "reduce/reduction.h")
RINGDL_EMBED(ringdl_text_bodies, "cuda/kernels.inc")
RINGDL_EMBED(ringdl_text_elements, "reduce/elements.inc")

namespace ringdl::cuda {

std::vector<std::pair<std::string_view, std::string_view>> kernel_sources() {
  return {{"cuda/kernels.cu", {ringdl_text_kernels, ringdl_text_kernels_end}},
          {"cuda/kernels.h", {ringdl_text_arguments, ringdl_text_arguments_end}},
          {"reduce/reduction.h", {ringdl_text_reduction, ringdl_text_reduction_end}},
          {"cuda/kernels.inc", {ringdl_text_bodies, ringdl_text_bodies_end}},
          {"reduce/elements.inc", {ringdl_text_elements, ringdl_text_elements_end}}};
}

}  // namespace ringdl::cuda

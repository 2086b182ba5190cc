// A shared library that allocates by the C library, for imports_test.

#include "importing.h"

#include <cstdlib>

namespace ringdl::check {

void* (*const volatile allocates)(size_t) = &std::malloc;

const void* here() { return reinterpret_cast<const void*>(&here); }

void* take(size_t bytes) {
  void* block = nullptr;
  return posix_memalign(&block, 64, bytes) == 0 ? block : nullptr;
}

void drop(void* block) { std::free(block); }

void* take_by_pointer(size_t bytes) { return allocates(bytes); }

}  // namespace ringdl::check

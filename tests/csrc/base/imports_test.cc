// A loaded library calls other functions than those that it imports; nobody else does.

#include "base/imports.h"

#include <array>
#include <cstdlib>

#include "check.h"
#include "importing.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

int taken = 0, dropped = 0, by_pointer = 0;

int replaced_memalign(void** block, size_t alignment, size_t bytes) {
  ++taken;
  return posix_memalign(block, alignment, bytes);
}

void replaced_free(void* block) {
  ++dropped;
  std::free(block);
}

void* replaced_malloc(size_t bytes) {
  ++by_pointer;
  return std::malloc(bytes);
}

void test_all_or_none() {
  const std::array imports{Import{"free", reinterpret_cast<void*>(&replaced_free)},
                           Import{"imported_nowhere", reinterpret_cast<void*>(&replaced_free)}};
  CHECK(!replace_imports(here(), imports));
  const int nowhere = 0;  // on the stack
  CHECK(!replace_imports(&nowhere, imports));
  drop(take(100));
  CHECK_EQ(dropped, 0);
}

void test_calls_are_replaced() {
  const std::array imports{
      Import{"posix_memalign", reinterpret_cast<void*>(&replaced_memalign)},
      Import{"free", reinterpret_cast<void*>(&replaced_free)},
      Import{"malloc", reinterpret_cast<void*>(&replaced_malloc)},
  };
  CHECK(replace_imports(here(), imports));
  drop(take(100));
  CHECK_EQ(taken, 1);
  CHECK_EQ(dropped, 1);
  drop(take_by_pointer(100));  // a constant that holds the function's address
  CHECK_EQ(by_pointer, 1);
  std::free(std::malloc(100));
  void* block = nullptr;
  CHECK_EQ(posix_memalign(&block, 64, 100), 0);
  std::free(block);
  CHECK_EQ(taken + dropped + by_pointer, 4);
}

}  // namespace

int main() {
  test_all_or_none();
  test_calls_are_replaced();
  return report();
}

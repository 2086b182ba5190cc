#include "binding/xla_memory.h"

#include <array>
#include <cstdlib>
#include <utility>

#include "base/imports.h"
#include "transport/shm/reused_blocks.h"
#include "transport/shm/segment_window.h"

namespace ringdl::binding {
namespace {

// Never destroyed: XLA frees arrays after that.
ReusedBlocks& blocks() {
  static auto* const its = new ReusedBlocks;
  return *its;
}

int allocate(void** block, size_t alignment, size_t bytes) {
  if (bytes >= kAloneBytes && alignment <= Window::kAlignment) {
    if (void* const its = blocks().take(bytes)) {
      *block = its;
      return 0;
    }
  }
  return posix_memalign(block, alignment, bytes);
}

void release(void* block) {
  if (block != nullptr && !blocks().give_back(block)) std::free(block);
}

}  // namespace

void take_over_xla_memory(const void* inside) {
  static const bool is_done = replace_imports(
      inside, std::array{Import{"posix_memalign", reinterpret_cast<void*>(&allocate)},
                         Import{"free", reinterpret_cast<void*>(&release)}});
  (void)is_done;
}

// Where the system promises no more memory than it has, a region of pages that may never be touched
// is too much to ask for.
void set_xla_window(std::shared_ptr<Window> window) {
  if (SegmentWindow::commits_strictly()) window = nullptr;
  blocks().set_window(std::move(window));
}

void keep_xla_memory(const void* array) { blocks().keep_for_good(array); }

}  // namespace ringdl::binding

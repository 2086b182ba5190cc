#pragma once

#include <cstddef>

namespace ringdl::check {

[[gnu::visibility("default")]] const void* here();
[[gnu::visibility("default")]] void* take(size_t bytes);
[[gnu::visibility("default")]] void drop(void* block);
[[gnu::visibility("default")]] void* take_by_pointer(size_t bytes);

}  // namespace ringdl::check

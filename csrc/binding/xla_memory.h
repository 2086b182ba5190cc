#pragma once

#include <cstddef>
#include <memory>

#include "transport/window.h"

/// Arrays of XLA on the CPU in memory that ranks share, so that collectives of compiled functions
/// reduce them where they are, and steps touch no new pages. Any thread.
namespace ringdl::binding {

/// Arrays of at least so many bytes are reduced where they are, smaller ones together, in a copy.
inline constexpr size_t kAloneBytes = 256 << 10;

/// Has XLA take large blocks from here, as soon as there is a window: in place of the C library's
/// posix_memalign() and free(). Without effect where it allocates in another way.
/// @param inside  an address in XLA's code
void take_over_xla_memory(const void* inside);

/// Where blocks are from now on; null: where the C library puts them. Earlier ones stay valid.
void set_xla_window(std::shared_ptr<Window> window);

/// Never reuses the memory of an array, if it is from here: its work has failed, and another rank
/// that has not heard of it may be writing there.
void keep_xla_memory(const void* array);

}  // namespace ringdl::binding

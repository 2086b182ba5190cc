#pragma once

#include <cstddef>

namespace ringdl {

/// Arrays from this size on do not stay in a cache until they are read again, and are streamed.
inline constexpr size_t kStreamBytes = 8 << 20;

/// Copies with stores that go past the caches: the target's lines are not read first, a third less
/// traffic if nobody reads the target soon. Call stream_fence() before publishing the data.
void stream_copy(std::byte* into, const std::byte* from, size_t bytes);

/// stream_copy() or memcpy().
void copy_bytes(std::byte* into, const std::byte* from, size_t bytes, bool streams);

/// Starts to fetch memory into this core's caches for reading and writing. Lines fetched only for
/// reading are requested again when they are written.
void fetch_to_write(const std::byte* begin, size_t bytes);

/// Orders streamed stores before all later ones.
void stream_fence();

}  // namespace ringdl

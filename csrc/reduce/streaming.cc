#include "reduce/streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ringdl {

#ifdef __SSE2__

// Whole lines, as only these leave the processor's write-combining buffers in one go.
void stream_copy(std::byte* into, const std::byte* from, size_t bytes) {
  constexpr size_t line = 64;
  const size_t head = std::min(bytes, (line - reinterpret_cast<uintptr_t>(into) % line) % line);
  std::memcpy(into, from, head);
  size_t i = head;
  for (; i + line <= bytes; i += line) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(into + i);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(into + i, from + i, bytes - i);
}

void stream_fence() { _mm_sfence(); }

#else

void stream_copy(std::byte* into, const std::byte* from, size_t bytes) {
  std::memcpy(into, from, bytes);
}

void stream_fence() {}

#endif

// Compilers emit a fetch to read unless PREFETCHW is enabled. On x86-64 processors without it, it
// is a no-op.
#ifdef __SSE2__
__attribute__((target("prfchw")))
#endif
void fetch_to_write(const std::byte* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(begin + i, 1);
}

void copy_bytes(std::byte* into, const std::byte* from, size_t bytes, bool streams) {
  if (streams) {
    stream_copy(into, from, bytes);
  } else {
    std::memcpy(into, from, bytes);
  }
}

}  // namespace ringdl

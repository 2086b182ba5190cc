#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringdl {

/// How an allreduce is computed. The values travel in headers, so they never change.
enum class Algorithm : uint8_t { kRing = 0, kDoubling = 1, kMpi = 2 };

constexpr std::string_view name_of(Algorithm algorithm) {
  constexpr std::string_view names[] = {"ring", "doubling", "mpi"};
  return names[static_cast<int>(algorithm)];
}

/// Up to so many bytes recursive doubling is taken: it sends each byte log2(P) times, the ring less
/// than twice, but in log2(P) steps, not 2(P-1). A function of the arguments alone, so that all
/// ranks choose alike.
inline constexpr size_t kDoublingBytes = 16 << 10;

constexpr Algorithm choose_allreduce(size_t bytes) {
  return bytes <= kDoublingBytes ? Algorithm::kDoubling : Algorithm::kRing;
}

}  // namespace ringdl

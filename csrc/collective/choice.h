#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringdl {

/// How an allreduce is computed. The values travel in headers, so they never change.
enum class Algorithm : uint8_t {
  kRing = 0,
  kDoubling = 1,
  kMpi = 2,
  kDirect = 3,
  kHierarchical = 4
};

constexpr std::string_view name_of(Algorithm algorithm) {
  constexpr std::string_view names[] = {"ring", "doubling", "mpi", "direct", "hierarchical"};
  return names[static_cast<int>(algorithm)];
}

/// Up to so many bytes recursive doubling is taken: it sends each byte log2(P) times, the ring less
/// than twice, but in log2(P) steps, not 2(P-1). A function of the arguments alone, so that all
/// ranks choose alike.
inline constexpr size_t kDoublingBytes = 16 << 10;

/// @param size  ranks
/// @param hosts  groups of ranks that share memory; `size` if none do
constexpr Algorithm choose_allreduce(size_t bytes, int size, int hosts) {
  if (bytes <= kDoublingBytes) return Algorithm::kDoubling;
  if (hosts == size) return Algorithm::kRing;
  return hosts == 1 ? Algorithm::kDirect : Algorithm::kHierarchical;
}

}  // namespace ringdl

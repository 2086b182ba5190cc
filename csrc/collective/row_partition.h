#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/partition.h"

namespace ringdl {

/// How rows are divided among ranks: consecutively and as evenly as possible; earlier ranks take
/// the remainder, one row each. Pure.
///
/// @return  the rows of each rank, as bytes
inline std::vector<Span> row_partition(int64_t rows, size_t row_bytes, int size) {
  std::vector<Span> parts;
  size_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t own_rows = rows / size + (rank < rows % size ? 1 : 0);
    parts.push_back({begin, static_cast<size_t>(own_rows) * row_bytes});
    begin += parts.back().bytes;
  }
  return parts;
}

}  // namespace ringdl

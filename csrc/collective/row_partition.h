#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringdl {

/// How rows are dealt to ranks: consecutively and as evenly as can be; earlier ranks take the
/// remainder, one row each. Pure.
///
/// @return  size + 1 byte offsets: rank r has the bytes from the r-th to the (r+1)-th
inline std::vector<size_t> row_partition(int64_t rows, size_t row_bytes, int size) {
  std::vector<size_t> offsets(1, 0);
  for (int rank = 0; rank < size; ++rank) {
    const int64_t own_rows = rows / size + (rank < rows % size ? 1 : 0);
    offsets.push_back(offsets.back() + static_cast<size_t>(own_rows) * row_bytes);
  }
  return offsets;
}

}  // namespace ringdl

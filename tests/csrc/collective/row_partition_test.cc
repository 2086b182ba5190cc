#include "collective/row_partition.h"

#include "check.h"

using ringdl::row_partition;
using ringdl::Span;

// Rows are not torn, and the first ranks have one more.
int main() {
  for (int size = 1; size <= 9; ++size) {
    for (const int64_t rows : {0, 1, 5, 8, 100}) {
      const std::vector<Span> parts = row_partition(rows, 12, size);
      CHECK_EQ(parts.size(), static_cast<size_t>(size));
      size_t begin = 0;
      for (int rank = 0; rank < size; ++rank) {
        const int64_t own = rows / size + (rank < rows % size ? 1 : 0);
        CHECK_EQ(parts[rank].bytes, static_cast<size_t>(own) * 12);
        CHECK_EQ(parts[rank].begin, begin);
        begin += parts[rank].bytes;
      }
      CHECK_EQ(begin, static_cast<size_t>(rows) * 12);
    }
  }
  CHECK_EQ(row_partition(int64_t{3} << 30, 8, 3)[2].begin, size_t{1} << 34);
  return ringdl::check::report();
}

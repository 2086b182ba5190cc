#include "collective/partition.h"

#include "check.h"

using ringdl::Partition;
using ringdl::Span;

// Chunks and segments cover the array exactly once and in order, whatever its size.
int main() {
  for (const size_t total : {0u, 1u, 63u, 64u, 65u, 127u, 1000u, 4096u, 100003u}) {
    for (int chunks = 1; chunks <= 9; ++chunks) {
      for (const size_t segment_bytes : {1u, 64u, 100u, 4096u, 1u << 20}) {
        const Partition partition(total, chunks, segment_bytes);
        CHECK(partition.segments() >= 1);
        size_t at = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
          for (int i = 0; i < partition.segments(); ++i) {
            const Span span = partition.segment(chunk, i);
            CHECK(span.bytes <= partition.segment_bytes());
            if (span.bytes == 0) continue;
            CHECK_EQ(span.begin, at);
            CHECK_EQ(span.begin % 64, 0u);
            at += span.bytes;
          }
        }
        CHECK_EQ(at, total);
      }
    }
  }
  return ringdl::check::report();
}

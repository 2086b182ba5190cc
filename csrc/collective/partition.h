#pragma once

#include <algorithm>
#include <cstddef>

namespace ringdl {

/// A part of a flat array, in bytes.
struct Span {
  size_t begin = 0;
  size_t bytes = 0;
};

/// How a flat array is cut into one chunk per rank, and each chunk into segments. Pure.
///
/// Chunks begin at multiples of 64 bytes, so that ranks do not share cache lines; hence the last
/// ones of a small array may be empty. Every chunk has the same number of segments, at least one;
/// the last ones of a short chunk may be empty too.
class Partition {
 public:
  Partition(size_t total_bytes, int chunks, size_t segment_bytes)
      : total_bytes_(total_bytes),
        chunk_bytes_(round_up(divide_up(total_bytes, static_cast<size_t>(chunks)))),
        segment_bytes_(round_up(std::max<size_t>(segment_bytes, 1))),
        segments_(static_cast<int>(std::max<size_t>(divide_up(chunk_bytes_, segment_bytes_), 1))) {}

  /// To where a chunk may begin.
  static constexpr size_t round_up(size_t bytes) { return divide_up(bytes, 64) * 64; }

  int segments() const { return segments_; }
  size_t segment_bytes() const { return std::min(segment_bytes_, chunk_bytes_); }

  Span segment(int chunk, int segment) const {
    const size_t end = std::min(total_bytes_, (static_cast<size_t>(chunk) + 1) * chunk_bytes_);
    const size_t begin = static_cast<size_t>(chunk) * chunk_bytes_ + segment * segment_bytes_;
    if (begin >= end) return {std::min(begin, total_bytes_), 0};
    return {begin, std::min(segment_bytes_, end - begin)};
  }

 private:
  static constexpr size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }
  size_t total_bytes_;
  size_t chunk_bytes_;
  size_t segment_bytes_;
  int segments_;
};

}  // namespace ringdl

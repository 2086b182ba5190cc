#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ringdl {

/// A rank's arrays, one after the other: what is to be pushed, or where parameters are to go.
struct Piece {
  size_t begin;  // among all parameters
  size_t count;
  std::byte* data;
};

/// Calls `act(begin, data, count)` for what pieces have of the parameters from `from` to `to`.
/// @param pieces  in their order
template <class Act>
void for_each_part(const std::vector<Piece>& pieces, size_t from, size_t to, size_t item_bytes,
                   const Act& act) {
  auto piece = std::ranges::partition_point(
      pieces, [from](const Piece& each) { return each.begin + each.count <= from; });
  for (; piece != pieces.end() && piece->begin < to; ++piece) {
    const size_t begin = std::max(from, piece->begin);
    const size_t end = std::min(to, piece->begin + piece->count);
    if (begin < end) act(begin, piece->data + (begin - piece->begin) * item_bytes, end - begin);
  }
}

}  // namespace ringdl

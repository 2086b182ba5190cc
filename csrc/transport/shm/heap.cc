#include "transport/shm/heap.h"

namespace ringdl {

std::optional<uint64_t> Heap::take(uint64_t bytes, uint64_t alignment) {
  if (bytes == 0) bytes = 1;
  for (auto part = free_.begin(); part != free_.end(); ++part) {
    const auto [free_begin, free_end] = *part;
    const uint64_t begin = (free_begin + alignment - 1) & ~(alignment - 1);
    if (begin > free_end || free_end - begin < bytes) continue;
    free_.erase(part);
    if (free_begin < begin) free_.emplace(free_begin, begin);
    if (begin + bytes < free_end) free_.emplace(begin + bytes, free_end);
    taken_.emplace(begin, begin + bytes);
    return begin;
  }
  return std::nullopt;
}

void Heap::give_back(uint64_t begin) {
  const auto found = taken_.find(begin);
  uint64_t end = found->second;
  taken_.erase(found);
  auto after = free_.lower_bound(begin);
  if (after != free_.end() && after->first == end) {
    end = after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->second == begin) {
      before->second = end;
      return;
    }
  }
  free_.emplace(begin, end);
}

}  // namespace ringdl

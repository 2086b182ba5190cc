#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace ringdl {

/// Which parts of a range of bytes are taken: first fit, neighbours joined when given back. Pure;
/// it touches no memory.
class Heap {
 public:
  /// The bytes from `begin` to `end` are free.
  Heap(uint64_t begin, uint64_t end) { free_.emplace(begin, end); }

  /// Takes `bytes` free bytes and returns where they begin: a multiple of `alignment` (a power of
  /// two). Nothing if there is no such place.
  std::optional<uint64_t> take(uint64_t bytes, uint64_t alignment);

  /// Frees what take() returned.
  void give_back(uint64_t begin);

 private:
  std::map<uint64_t, uint64_t> free_;   // begin -> end, never adjacent
  std::map<uint64_t, uint64_t> taken_;  // begin -> end
};

}  // namespace ringdl

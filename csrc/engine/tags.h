#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace ringdl {

/// How the tags above the control tag are used.
///
/// The tags 1 .. pooled are for granted messages, chosen by the receiver, one pool per sender; each
/// is reused once all messages on it have arrived. A work in flight holds at most one tag of each
/// sender's, so with as many tags as works may be in flight no work waits for another's tag, which
/// could deadlock. Above them each bucket has two tags of its own, one for odd instances.
struct TagLayout {
  static constexpr int kMostPooled = 65536;

  explicit TagLayout(int max_tag)
      : pooled(std::min(kMostPooled, max_tag / 2)), buckets((max_tag - pooled) / 2) {}

  int bucket_tag(int64_t bucket, uint64_t instance) const {
    return static_cast<int>(pooled + 1 + 2 * bucket + static_cast<int64_t>(instance % 2));
  }

  int pooled;
  int64_t buckets;
};

/// The tags 1 .. `size`; those that were given back are taken first.
class TagPool {
 public:
  explicit TagPool(int size) : size_(size) {}

  /// A free tag, or -1 if there is none.
  int take() {
    if (free_.empty()) return used_ < size_ ? ++used_ : -1;
    const int tag = free_.back();
    free_.pop_back();
    return tag;
  }
  void give_back(int tag) { free_.push_back(tag); }

 private:
  int size_;
  int used_ = 0;
  std::vector<int> free_;
};

/// A pool for each sending rank, made when it is first needed.
class TagPools {
 public:
  explicit TagPools(int size) : size_(size) {}
  TagPool& of(int rank) { return pools_.try_emplace(rank, size_).first->second; }

 private:
  int size_;
  std::unordered_map<int, TagPool> pools_;
};

}  // namespace ringdl

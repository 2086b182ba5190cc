#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ringdl {

/// How often each of many keys was used, by their hashes. 14 to 27 bytes each, as programs may
/// never use a key again, which cannot be known.
///
/// Open addressing: a hash is in the first place from its own on that was free when it was added.
class UseCounts {
 public:
  uint64_t of(uint64_t hash) const {
    if (hashes_.empty()) return 0;
    const uint32_t uses = uses_[place_of(hash)];
    return uses < kMany ? uses : many_.at(hash);
  }

  void add(uint64_t hash) {
    if (8 * (size_ + 1) > 7 * hashes_.size()) grow();
    const size_t place = place_of(hash);
    uint32_t& uses = uses_[place];
    if (uses == 0) {
      hashes_[place] = hash;
      ++size_;
    }
    if (uses < kMany) ++uses;
    if (uses == kMany) ++many_.try_emplace(hash, kMany - 1).first->second;
  }

  size_t size() const { return size_; }

 private:
  static constexpr uint32_t kMany = std::numeric_limits<uint32_t>::max();
  static constexpr size_t kLeastPlaces = 16;

  // Where it is, or would be. Some place is free.
  size_t place_of(uint64_t hash) const {
    const size_t mask = hashes_.size() - 1;
    const int bits = std::countr_zero(hashes_.size());
    size_t place = (hash * 0x9e3779b97f4a7c15u) >> (64 - bits);
    while (uses_[place] > 0 && hashes_[place] != hash) place = (place + 1) & mask;
    return place;
  }

  void grow() {
    const std::vector<uint64_t> hashes = std::move(hashes_);
    const std::vector<uint32_t> uses = std::move(uses_);
    const size_t places = hashes.empty() ? kLeastPlaces : 2 * hashes.size();
    hashes_.assign(places, 0);
    uses_.assign(places, 0);
    for (size_t i = 0; i < hashes.size(); ++i) {
      if (uses[i] == 0) continue;
      const size_t place = place_of(hashes[i]);
      hashes_[place] = hashes[i];
      uses_[place] = uses[i];
    }
  }

  std::vector<uint64_t> hashes_;  // by place: a power of two of them
  std::vector<uint32_t> uses_;    // 0: the place is free; kMany: see many_
  std::unordered_map<uint64_t, uint64_t> many_;
  size_t size_ = 0;
};

}  // namespace ringdl

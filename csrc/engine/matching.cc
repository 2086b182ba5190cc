#include "engine/matching.h"

#include <utility>

namespace ringdl {

void Matching::park(const ControlMessage& message) {
  Parked& parked = parked_[message.head.key];
  if (!parked.failure.empty()) return;
  parked.messages.push_back({message.from,
                             message.head,
                             message.description,
                             {message.payload, message.payload + message.head.payload_bytes}});
}

Matching::Parked Matching::take(const Key& key) {
  const auto found = parked_.empty() ? parked_.end() : parked_.find(key);
  if (found == parked_.end()) return {};
  Parked parked = std::move(found->second);
  parked_.erase(found);
  return parked;
}

std::vector<Key> Matching::bucket_launches() const {
  std::vector<Key> launches;
  for (const auto& [key, uses] : next_instances_) {
    if (key.space == KeySpace::kBucket) launches.push_back({key.space, key.hash, uses});
  }
  return launches;
}

}  // namespace ringdl

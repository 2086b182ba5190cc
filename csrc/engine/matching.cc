#include "engine/matching.h"

#include <algorithm>
#include <utility>

namespace ringdl {

void Matching::park(const ControlMessage& message) {
  Parked& parked = parked_[message.head.key];
  if (parked.failure) return;
  parked.messages.push_back({message.from,
                             message.head,
                             message.description,
                             {message.payload, message.payload + message.head.payload_bytes}});
}

bool Matching::has_header(const Key& key) const {
  const auto found = parked_.find(key);
  if (found == parked_.end()) return false;
  const Parked& parked = found->second;
  return parked.failure || std::any_of(parked.messages.begin(), parked.messages.end(),
                                       [](const Parked::Message& message) {
                                         return message.head.type == MessageType::kSubmit;
                                       });
}

Matching::Parked Matching::take(const Key& key) {
  const auto found = parked_.empty() ? parked_.end() : parked_.find(key);
  if (found == parked_.end()) return {};
  Parked parked = std::move(found->second);
  parked_.erase(found);
  return parked;
}

std::optional<Matching::Header> Matching::find_header(
    uint64_t apart, uint64_t joins, const std::function<bool(const Header&)>& wanted) {
  for (auto at = parked_.begin(); at != parked_.end();) {
    const auto& [key, parked] = *at;
    const bool is_call = key.space == KeySpace::kName || key.space == KeySpace::kUnnamed;
    if (!is_call || key.hash == apart || !is_next(key)) {
      ++at;
      continue;
    }
    if (parked.failure && parked.failure.joins > joins) {
      ++at;
      continue;
    }
    if (parked.failure) {
      advance(key);
      parked_.erase(at);
      at = parked_.begin();  // the use after it may be among those before it
      continue;
    }
    for (const Parked::Message& message : parked.messages) {
      if (message.head.type != MessageType::kSubmit) continue;
      const Header header{key, message.from, message.description};
      if (wanted(header)) return header;
    }
    ++at;
  }
  return std::nullopt;
}

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/control.h"
#include "engine/failure.h"
#include "engine/wire.h"

namespace ringdl {

/// Which uses of each key this rank has submitted, and what has come for those that it has not.
///
/// A use of a key is ahead, submitted, or skipped: a use that no other rank will submit (a name
/// that was found to be wrong) is counted, so that all ranks agree on which one is next.
class Matching {
 public:
  /// What came for a key that this rank has not submitted yet.
  struct Parked {
    struct Message {
      int from;
      MessageHead head;
      Description description;
      std::vector<std::byte> payload;
    };
    std::vector<Message> messages;
    Failure failure;  // set once the key is known to fail
  };

  /// The key of the next use.
  Key next(KeySpace space, uint64_t hash) {
    return {space, hash, next_instances_[{space, hash, 0}]};
  }
  /// The next use is submitted, or skipped.
  void advance(const Key& key) { ++next_instances_[{key.space, key.hash, 0}]; }
  /// How many uses of a key were submitted or skipped, whatever the instance.
  uint64_t uses(const Key& key) const {
    const auto found = next_instances_.find({key.space, key.hash, 0});
    return found == next_instances_.end() ? 0 : found->second;
  }
  bool is_ahead(const Key& key) const { return key.instance >= uses(key); }
  bool is_next(const Key& key) const { return key.instance == uses(key); }

  void park(const ControlMessage& message);
  void park_failure(const Key& key, const Failure& why) { parked_[key] = {{}, why}; }
  bool is_known_to_fail(const Key& key) const {
    const auto found = parked_.empty() ? parked_.end() : parked_.find(key);
    return found != parked_.end() && found->second.failure;
  }
  /// What has come for a key; nothing is kept.
  Parked take(const Key& key);

  /// The header of a key's next use, which another rank has submitted and this one has not.
  struct Header {
    Key key;
    int from;
    Description description;
  };
  /// One for which `wanted` holds. Uses that are known to fail are skipped.
  /// @param apart  a key that is left alone
  /// @param joins  likewise, failures of what was submitted after more joins
  std::optional<Header> find_header(uint64_t apart, uint64_t joins,
                                    const std::function<bool(const Header&)>& wanted);

  size_t keys() const { return next_instances_.size(); }
  size_t parked_keys() const { return parked_.size(); }

 private:
  std::unordered_map<Key, uint64_t, KeyHash> next_instances_;  // by key with instance 0
  std::unordered_map<Key, Parked, KeyHash> parked_;
};

}  // namespace ringdl

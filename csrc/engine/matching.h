#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/control.h"
#include "engine/failure.h"
#include "engine/use_counts.h"
#include "engine/wire.h"

namespace ringdl {

/// Which uses of each key this rank has submitted, and what has arrived for those that it has not.
///
/// A use of a key is ahead, submitted, or skipped: a use that no other rank will submit (a name
/// that was found to be wrong) is counted, so that all ranks agree on which one is next. Counts are
/// kept for good, in little room: nobody knows that a rank will not use a name again, and if one
/// forgot it before the others, they would disagree on the next use.
class Matching {
 public:
  /// What has arrived for a key that this rank has not submitted yet.
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
  Key next(KeySpace space, uint64_t hash) const { return {space, hash, counts(space).of(hash)}; }
  /// The next use is submitted, or skipped.
  void advance(const Key& key) { uses_[static_cast<size_t>(key.space)].add(key.hash); }
  /// How many uses of a key were submitted or skipped, whatever the instance.
  uint64_t uses(const Key& key) const { return counts(key.space).of(key.hash); }
  bool is_ahead(const Key& key) const { return key.instance >= uses(key); }
  bool is_next(const Key& key) const { return key.instance == uses(key); }

  void park(const ControlMessage& message);
  void park_failure(const Key& key, const Failure& why) { parked_[key] = {{}, why}; }
  bool is_known_to_fail(const Key& key) const {
    const auto found = parked_.empty() ? parked_.end() : parked_.find(key);
    return found != parked_.end() && found->second.failure;
  }
  /// Whether another rank has submitted a key that this rank has not.
  bool has_header(const Key& key) const;
  /// What has arrived for a key; nothing is kept.
  Parked take(const Key& key);

  /// The header of a call's next use, which another rank has submitted and this one has not.
  struct Header {
    Key key;
    int from;
    Description description;
  };
  /// One for which `wanted` holds. Uses that are known to fail are skipped.
  /// @param apart  a key that is ignored
  /// @param joins  ignores failures of what was submitted after more joins, too
  std::optional<Header> find_header(uint64_t apart, uint64_t joins,
                                    const std::function<bool(const Header&)>& wanted);

  size_t keys() const {
    size_t keys = 0;
    for (const UseCounts& each : uses_) keys += each.size();
    return keys;
  }
  size_t parked_keys() const { return parked_.size(); }

 private:
  const UseCounts& counts(KeySpace space) const { return uses_[static_cast<size_t>(space)]; }

  std::array<UseCounts, kKeySpaces> uses_;  // by space
  std::unordered_map<Key, Parked, KeyHash> parked_;
};

}  // namespace ringdl

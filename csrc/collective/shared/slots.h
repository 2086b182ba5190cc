#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ringdl {

/// Where ranks that share memory hand one another small arrays: each rank has two slots of its own,
/// which it writes in turn and all others read. A call has a number, its instance, which all ranks
/// count alike. For each instance a rank either puts its array into a slot, or passes: it takes
/// part another way, so all do.
///
/// A slot is written again only when all ranks have said that they do not need what is in it. One
/// instance at a time may be under way in slots on each rank; it passes the others meanwhile.
///
/// Threads: one at a time. Memory: see bytes(); all zeros in the beginning.
class Slots {
 public:
  static constexpr size_t kPayloadBytes = 64 << 10;
  enum class State : uint8_t { kNotYet, kPut, kPassed };

  /// Up to how many bytes an array is better put into slots than reduced where it is, which takes
  /// two meetings more: each rank reads all arrays, so the more ranks, the less. On two cores slots
  /// were faster at all sizes up to 8 ranks, 3 times as fast on 8; what these read at most, more
  /// ranks do, too.
  static constexpr size_t most_bytes(int size) {
    constexpr size_t kMostRead = 8 * kPayloadBytes;
    return std::min(kPayloadBytes, kMostRead / static_cast<size_t>(size));
  }

  /// Of each rank.
  static constexpr size_t bytes() { return kHeadBytes + kSlots * (kLineBytes + kPayloadBytes); }

  /// @param memory  of each rank, as this process sees it
  Slots(std::vector<std::byte*> memory, int rank);

  int size() const { return static_cast<int>(memory_.size()); }

  /// This rank is going to put an array; finish() comes in the end.
  void begin(uint64_t instance);
  /// Whether the slot of an instance is free: else look again later.
  bool can_put(uint64_t instance);
  /// Whether this rank has passed a later instance since begin(), and so this one, too.
  bool is_too_late(uint64_t instance) const { return reached_ > instance; }
  /// @param digest  what all ranks must agree on
  /// @param bytes  at most kPayloadBytes
  void put(uint64_t instance, uint64_t digest, const std::byte* data, size_t bytes);
  void pass(uint64_t instance);

  /// What a rank does in this instance. Instances that this rank has finished are forgotten.
  State state_of(int rank, uint64_t instance);
  /// What it has put.
  uint64_t digest(int rank, uint64_t instance) const;
  const std::byte* payload(int rank, uint64_t instance) const;

  /// This rank will not look at the instance again.
  void finish(uint64_t instance);

 private:
  using Counter = std::atomic<uint64_t>;
  static_assert(Counter::is_always_lock_free);

  static constexpr uint64_t kSlots = 2;
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kHeadBytes = 2 * kLineBytes;

  struct Head {        // of a slot
    Counter sequence;  // the instance + 1
    uint64_t digest;
  };

  // How many instances a rank had reached when it last passed one. Written only then: all read it
  // while they wait, and a line that others read takes long to write.
  Counter& passed(int rank) const { return *reinterpret_cast<Counter*>(at(rank)); }
  // From which instance on a rank may still look.
  Counter& finished(int rank) const { return *reinterpret_cast<Counter*>(at(rank) + kLineBytes); }
  Head& head(int rank, uint64_t instance) const {
    return *reinterpret_cast<Head*>(at(rank) + kHeadBytes +
                                    instance % kSlots * (kLineBytes + kPayloadBytes));
  }
  std::byte* at(int rank) const { return memory_[static_cast<size_t>(rank)]; }

  void update_finished();

  const std::vector<std::byte*> memory_;
  const int rank_;
  std::vector<uint64_t> known_finished_;  // by rank: at least
  uint64_t reached_ = 0;                  // by this rank: how many instances
  std::optional<uint64_t> under_way_;
};

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ringdl {

/// Ranks that have collectives of their own, in an order of their own. Works hold the group that
/// they belong to. Groups are not announced: members that make equal groups have the same one.
struct Group {
  uint64_t id = 0;         // 0: all ranks, in their order
  std::vector<int> ranks;  // of the engine's communicator; each at most once
  int rank = 0;            // which of them this one is
  std::string text;        // how errors name it, after a work's name; empty for all ranks

  int size() const { return static_cast<int>(ranks.size()); }
  bool is_all() const { return id == 0; }

  /// Which member a rank of the engine's communicator is; -1 if it is none.
  int index_of(int engine_rank) const;
};

using SharedGroup = std::shared_ptr<const Group>;

/// All of `size` ranks.
SharedGroup group_of_all(int rank, int size);

/// Some of `size` ranks.
/// @param rank  this one, a member
/// @param salt  distinguishes groups of the same ranks
/// @throws UsageError  a rank that does not exist, occurs twice, or this one is no member
SharedGroup group_of(std::vector<int> ranks, int rank, int size, uint64_t salt);

/// The two ends of a message; the sender is the first member.
/// @throws UsageError  a rank that does not exist, or both are the same
SharedGroup group_of_pair(int from, int to, const Group& group);

/// The members of a group, for a receive of this rank's that names no sender.
SharedGroup group_of_receiver(const Group& group);

/// "rank 3", "ranks 1, 2 and 5", "ranks 0 to 6".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace ringdl

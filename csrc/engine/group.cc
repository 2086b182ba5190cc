#include "engine/group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

// FNV-1a over the eight bytes of each number; never 0, which means all ranks.
uint64_t hash_of_numbers(const std::vector<int>& numbers, uint64_t salt) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&hash](uint64_t number) {
    for (int i = 0; i < 8; ++i) hash = (hash ^ (number >> 8 * i & 0xff)) * 0x100000001b3u;
  };
  add(salt);
  for (const int number : numbers) add(static_cast<uint64_t>(number));
  return std::max<uint64_t>(hash, 1);
}

}  // namespace

int Group::index_of(int engine_rank) const {
  if (is_all()) return engine_rank;
  const auto found = std::find(ranks.begin(), ranks.end(), engine_rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

SharedGroup group_of_all(int rank, int size) {
  auto group = std::make_shared<Group>();
  group->ranks.resize(static_cast<size_t>(size));
  std::iota(group->ranks.begin(), group->ranks.end(), 0);
  group->rank = rank;
  return group;
}

SharedGroup group_of(std::vector<int> ranks, int rank, int size, uint64_t salt) {
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.empty() || sorted.front() < 0 || sorted.back() >= size) {
    throw UsageError("a group holds some of the ranks 0 to " + std::to_string(size - 1) +
                     ", at least one");
  }
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw UsageError("a group holds each rank once; rank " + std::to_string(*twice) +
                     " occurs twice");
  }
  auto group = std::make_shared<Group>();
  group->id = hash_of_numbers(ranks, salt);
  group->ranks = std::move(ranks);
  group->rank = group->index_of(rank);
  group->text = " of the group of " + ranks_text(sorted);
  if (group->rank < 0) {
    throw UsageError("rank " + std::to_string(rank) +
                     " is not in the group that it makes; only members make a group");
  }
  return group;
}

SharedGroup group_of_pair(int from, int to, const Group& group) {
  for (const int end : {from, to}) {
    if (end < 0 || end >= group.size()) {
      throw UsageError("rank " + std::to_string(end) + " is not a rank; ranks are 0 to " +
                       std::to_string(group.size() - 1));
    }
  }
  if (from == to) {
    throw UsageError("rank " + std::to_string(from) +
                     " cannot send to itself; copy the array instead");
  }
  auto pair = std::make_shared<Group>();
  pair->ranks = {group.ranks[static_cast<size_t>(from)], group.ranks[static_cast<size_t>(to)]};
  pair->id = hash_of_numbers(pair->ranks, ~group.id);
  pair->rank = group.rank == from ? 0 : 1;
  pair->text =
      " from rank " + std::to_string(pair->ranks[0]) + " to rank " + std::to_string(pair->ranks[1]);
  return pair;
}

SharedGroup group_of_receiver(const Group& group) {
  auto members = std::make_shared<Group>(group);
  const int receiver = group.ranks[static_cast<size_t>(group.rank)];
  members->id = hash_of_numbers({receiver}, ~group.id);
  members->text = " from any rank to rank " + std::to_string(receiver);
  return members;
}

std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  std::string text = "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    const bool is_end = last + 1 == ranks.size() && last != i + 1;
    if (i > 0) text += is_end ? " and " : ", ";
    text += std::to_string(ranks[i]);
    if (last > i + 1) {
      text += " to " + std::to_string(ranks[last]);
      i = last;
    }
  }
  return text;
}

}  // namespace ringdl

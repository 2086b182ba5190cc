#include "collective/messages/tree_broadcast.h"

#include <algorithm>
#include <bit>

#include "collective/partition.h"

namespace ringdl {
namespace {

constexpr int64_t kDepth = 4;

int64_t segments_of(size_t bytes, size_t segment_bytes) {
  return std::max<int64_t>(1, static_cast<int64_t>((bytes + segment_bytes - 1) / segment_bytes));
}

int rounds_of(int size) { return std::bit_width(static_cast<unsigned>(size - 1)); }

}  // namespace

TreeBroadcast::TreeBroadcast(std::byte* data, size_t bytes, int root, int rank, int size,
                             size_t segment_bytes)
    : data_(data),
      bytes_(bytes),
      root_(root),
      size_(size),
      place_((rank - root + size) % size),
      segment_bytes_(segment_bytes),
      segments_(segments_of(bytes, segment_bytes)),
      distance_((1 << rounds_of(size)) / 2) {}

// In units of one segment's time: the last rank of the chain has all S segments after P - 2 + S,
// while each round of the tree takes S.
bool TreeBroadcast::is_faster(size_t bytes, int size, size_t segment_bytes) {
  const int64_t segments = segments_of(bytes, segment_bytes);
  return segments * rounds_of(size) < size - 2 + segments;
}

bool TreeBroadcast::step(Channel& channel) {
  for (; distance_ > 0; distance_ /= 2, posted_ = launched_ = 0) {
    const int to = rank_at(place_ + distance_);
    const int from = rank_at(place_ - distance_);
    const int from_place = (place_ - distance_ + size_) % size_;
    const int64_t incoming = messages(from_place, distance_);
    const int64_t outgoing = messages(place_, distance_);
    const auto segment = [this](bool is_data_message, int64_t number) -> Span {
      if (!is_data_message) return {};
      const size_t begin = static_cast<size_t>(number) * segment_bytes_;
      return {begin, std::min(segment_bytes_, bytes_ - begin)};
    };
    while (posted_ < incoming && posted_ < channel.received(from) + kDepth) {
      const Span span = segment(is_data(from_place, distance_), posted_++);
      channel.receive(from, data_ + span.begin, span.bytes);
    }
    while (launched_ < outgoing && launched_ < channel.sent(to) + 2 * kDepth) {
      const Span span = segment(is_data(place_, distance_), launched_++);
      channel.send(to, data_ + span.begin, span.bytes);
    }
    if (channel.received(from) < incoming || launched_ < outgoing) return false;
  }
  for (int distance = (1 << rounds_of(size_)) / 2; distance > 0; distance /= 2) {
    if (channel.sent(rank_at(place_ + distance)) < messages(place_, distance)) return false;
  }
  return true;
}

std::string TreeBroadcast::describe() const {
  const int rounds = rounds_of(size_);
  const int complete = rounds - std::bit_width(static_cast<unsigned>(distance_));
  return "broadcast: " + std::to_string(complete) + " of " + std::to_string(rounds) +
         " rounds complete";
}

}  // namespace ringdl

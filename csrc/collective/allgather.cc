#include "collective/allgather.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace ringdl {

Allgather::Allgather(const std::byte* block, size_t bytes, std::vector<int> order, int rank,
                     size_t segment_bytes)
    : block_(block),
      order_(std::move(order)),
      rank_(rank),
      size_(static_cast<int>(order_.size())),
      segment_bytes_(segment_bytes) {
  result_.lengths.assign(order_.size(), -1);
  result_.lengths[place_of(rank)] = static_cast<int64_t>(bytes);
}

// In both rounds rank r first sends what is its own and then passes on what it received, so the
// m-th thing sent is the (m-1)-th received; the last one received is not passed on.
bool Allgather::gather_lengths(Channel& channel) {
  const int previous = (rank_ + size_ - 1) % size_;
  const int next = (rank_ + 1) % size_;
  while (lengths_posted_ < size_ - 1) {
    const size_t from = place_of(rank_ - 1 - lengths_posted_);
    channel.receive(previous, &result_.lengths[from], sizeof(int64_t));
    ++lengths_posted_;
  }
  while (lengths_sent_ < std::min<int64_t>(size_ - 1, channel.received(previous) + 1)) {
    const size_t of = place_of(rank_ - lengths_sent_);
    channel.send(next, &result_.lengths[of], sizeof(int64_t));
    ++lengths_sent_;
  }
  return channel.received(previous) >= size_ - 1;
}

// The blocks of ranks first, first-1, ..., `count` of them, cut into segments.
std::vector<Allgather::Piece> Allgather::pieces_of(int first, int count) const {
  std::vector<size_t> begins(static_cast<size_t>(size_), 0);
  std::partial_sum(result_.lengths.begin(), result_.lengths.end() - 1, begins.begin() + 1);
  std::vector<Piece> pieces;
  for (int i = 0; i < count; ++i) {
    const size_t owner = place_of(first - i);
    const auto length = static_cast<size_t>(result_.lengths[owner]);
    for (size_t done = 0; done < length; done += segment_bytes_) {
      pieces.push_back({begins[owner] + done, std::min(segment_bytes_, length - done)});
    }
  }
  return pieces;
}

void Allgather::begin_blocks() {
  const size_t place = place_of(rank_);
  const auto own = static_cast<size_t>(result_.lengths[place]);
  result_.data = Buffer(std::accumulate(result_.lengths.begin(), result_.lengths.end(), size_t{0}));
  const auto begin = std::accumulate(
      result_.lengths.begin(), result_.lengths.begin() + static_cast<int64_t>(place), size_t{0});
  if (own > 0) std::memcpy(result_.data.data() + begin, block_, own);
  incoming_ = pieces_of(rank_ - 1, size_ - 1);
  outgoing_ = pieces_of(rank_, size_ - 1);
  own_pieces_ = size_ > 1 ? static_cast<int64_t>(pieces_of(rank_, 1).size()) : 0;
  blocks_begun_ = true;
}

bool Allgather::step(Channel& channel) {
  if (!blocks_begun_) {
    if (!gather_lengths(channel)) return false;
    begin_blocks();
  }
  if (size_ == 1) return true;
  const int previous = (rank_ + size_ - 1) % size_;
  const int next = (rank_ + 1) % size_;
  const auto incoming = static_cast<int64_t>(incoming_.size());
  const auto outgoing = static_cast<int64_t>(outgoing_.size());
  received_ = channel.received(previous) - (size_ - 1);
  while (posted_ < std::min(incoming, received_ + kDepth)) {
    const Piece& piece = incoming_[posted_++];
    channel.receive(previous, result_.data.data() + piece.begin, piece.bytes);
    received_ = channel.received(previous) - (size_ - 1);
  }
  while (launched_ < std::min({outgoing, received_ + own_pieces_,
                               channel.sent(next) - (size_ - 1) + 2 * kDepth})) {
    const Piece& piece = outgoing_[launched_++];
    channel.send(next, result_.data.data() + piece.begin, piece.bytes);
  }
  return received_ == incoming && channel.sent(next) == outgoing + size_ - 1;
}

std::string Allgather::describe() const {
  if (!blocks_begun_) return "allgather: lengths not known yet";
  return "allgather: " + std::to_string(received_) + " of " + std::to_string(incoming_.size()) +
         " segments received";
}

}  // namespace ringdl

#include "collective/messages/ring_blocks.h"

#include <algorithm>

namespace ringdl {

// Rank r first sends its own block and then passes on what it received; the last block that it
// receives is not passed on.
RingBlocks::RingBlocks(std::byte* data, const std::vector<Span>& blocks, int rank,
                       size_t segment_bytes)
    : data_(data), rank_(rank), size_(static_cast<int>(blocks.size())) {
  for (int i = 0; i < size_; ++i) {
    const Span& block = blocks[static_cast<size_t>((rank_ - i + size_) % size_)];
    for (size_t done = 0; done < block.bytes; done += segment_bytes) {
      const Span segment{block.begin + done, std::min(segment_bytes, block.bytes - done)};
      if (i > 0) incoming_.push_back(segment);
      if (i < size_ - 1) outgoing_.push_back(segment);
    }
    if (i > 0) ends_.push_back(static_cast<int64_t>(incoming_.size()));
    if (i == 0) own_segments_ = static_cast<int64_t>(outgoing_.size());
  }
}

bool RingBlocks::step(Channel& channel) {
  if (size_ == 1) return true;
  const int previous = (rank_ + size_ - 1) % size_;
  const int next = (rank_ + 1) % size_;
  const auto incoming = static_cast<int64_t>(incoming_.size());
  const auto outgoing = static_cast<int64_t>(outgoing_.size());
  received_ = channel.received(previous);
  while (posted_ < std::min(incoming, received_ + kDepth)) {
    const Span& segment = incoming_[static_cast<size_t>(posted_++)];
    channel.receive(previous, data_ + segment.begin, segment.bytes);
    received_ = channel.received(previous);
  }
  while (launched_ <
         std::min({outgoing, received_ + own_segments_, channel.sent(next) + 2 * kDepth})) {
    const Span& segment = outgoing_[static_cast<size_t>(launched_++)];
    channel.send(next, data_ + segment.begin, segment.bytes);
  }
  return received_ == incoming && channel.sent(next) == outgoing;
}

int RingBlocks::blocks_here() const {
  return static_cast<int>(std::ranges::upper_bound(ends_, received_) - ends_.begin());
}

std::string RingBlocks::describe() const {
  return std::to_string(received_) + " of " + std::to_string(incoming_.size()) +
         " segments received";
}

}  // namespace ringdl

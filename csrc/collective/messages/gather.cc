#include "collective/messages/gather.h"

#include <cstring>

namespace ringdl {

Gather::Gather(Executor& executor, const std::byte* block, size_t bytes, int root, int rank,
               int size, size_t segment_bytes)
    : executor_(executor),
      block_(block),
      bytes_(static_cast<int64_t>(bytes)),
      root_(root),
      rank_(rank),
      size_(size),
      segment_bytes_(segment_bytes),
      outgoing_(root, 1, block, bytes, segment_bytes) {
  if (rank == root) {
    result_.lengths.resize(static_cast<size_t>(size), -1);
    result_.lengths[static_cast<size_t>(root)] = bytes_;
  }
}

bool Gather::give(Channel& channel) {
  if (!begun_) {
    channel.receive(root_, nullptr, 0);
    channel.send(root_, &bytes_, sizeof(bytes_));
    begun_ = true;
  }
  return channel.received(root_) == 1 && outgoing_.step(channel);
}

bool Gather::hear(Channel& channel) {
  for (int i = 0; !begun_ && i < size_ - 1; ++i) {
    channel.receive(other(i), &result_.lengths[static_cast<size_t>(other(i))], sizeof(int64_t));
  }
  begun_ = true;
  while (heard_ < size_ - 1 && channel.received(other(heard_)) > 0) ++heard_;
  return heard_ == size_ - 1;
}

void Gather::ask(Channel& channel) {
  asked_ = true;
  size_t total = 0;
  for (const int64_t length : result_.lengths) total += static_cast<size_t>(length);
  result_.data = Buffer(total);
  std::byte* place = result_.data.data();
  for (int rank = 0; rank < size_; ++rank) {
    const auto length = static_cast<size_t>(result_.lengths[static_cast<size_t>(rank)]);
    if (rank != root_) {
      channel.send(rank, nullptr, 0);
      incoming_.emplace_back(rank, 1, place, length, segment_bytes_);
    } else {
      copied_ = executor_.copy(place, block_, length);
    }
    place += length;
  }
}

bool Gather::collect(Channel& channel) {
  std::erase_if(incoming_, [&](IncomingBlock& block) { return block.step(channel); });
  while (asks_left_ < size_ - 1 && channel.sent(other(asks_left_)) > 0) ++asks_left_;
  return incoming_.empty() && asks_left_ == size_ - 1 && executor_.is_done(copied_);
}

bool Gather::step(Channel& channel) {
  if (rank_ != root_) return give(channel);
  if (!asked_) {
    if (!hear(channel)) return false;
    ask(channel);
  }
  return collect(channel);
}

std::string Gather::describe() const {
  if (rank_ != root_) return "gather: gives its block to the root, once asked";
  const int others = size_ - 1;
  if (!asked_) {
    return "gather: " + std::to_string(heard_) + " of " + std::to_string(others) +
           " lengths received";
  }
  return "gather: " + std::to_string(others - static_cast<int>(incoming_.size())) + " of " +
         std::to_string(others) + " blocks received";
}

}  // namespace ringdl

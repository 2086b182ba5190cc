#include "collective/messages/scatter.h"

#include <cstring>
#include <utility>

namespace ringdl {

Scatter::Scatter(Executor& executor, const std::byte* data, std::vector<int64_t> send_bytes,
                 int root, int rank, int size, size_t segment_bytes)
    : executor_(executor),
      data_(data),
      send_bytes_(std::move(send_bytes)),
      root_(root),
      rank_(rank),
      size_(size),
      segment_bytes_(segment_bytes) {}

bool Scatter::take(Channel& channel) {
  if (!begun_) {
    begun_ = true;
    channel.receive(root_, &length_, sizeof(length_));
    channel.send(root_, nullptr, 0);
  }
  if (channel.received(root_) == 0) return false;
  if (!incoming_) {
    result_.data = Buffer(static_cast<size_t>(length_));
    result_.lengths = {length_};
    incoming_.emplace(root_, 1, result_.data.data(), result_.data.size(), segment_bytes_);
  }
  return incoming_->step(channel) && channel.sent(root_) == 1;
}

bool Scatter::hear(Channel& channel) {
  for (int i = 0; !begun_ && i < size_ - 1; ++i) channel.receive(other(i), nullptr, 0);
  begun_ = true;
  while (heard_ < size_ - 1 && channel.received(other(heard_)) > 0) ++heard_;
  return heard_ == size_ - 1;
}

void Scatter::begin_blocks(Channel& channel) {
  blocks_begun_ = true;
  const std::byte* block = data_;
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t& length = send_bytes_[static_cast<size_t>(rank)];
    const auto bytes = static_cast<size_t>(length);
    if (rank != root_) {
      channel.send(rank, &length, sizeof(length));
      outgoing_.emplace_back(rank, 1, block, bytes, segment_bytes_);
    } else {
      result_.data = Buffer(bytes);
      result_.lengths = {length};
      copied_ = executor_.copy(result_.data.data(), block, bytes);
    }
    block += bytes;
  }
}

bool Scatter::step(Channel& channel) {
  if (rank_ != root_) return take(channel);
  if (!blocks_begun_) {
    if (!hear(channel)) return false;
    begin_blocks(channel);
  }
  std::erase_if(outgoing_, [&](OutgoingBlock& block) { return block.step(channel); });
  return outgoing_.empty() && executor_.is_done(copied_);
}

std::string Scatter::describe() const {
  if (rank_ != root_) {
    return incoming_ ? "scatter: receives its block" : "scatter: waits for the root";
  }
  const int others = size_ - 1;
  if (!blocks_begun_) {
    return "scatter: " + std::to_string(heard_) + " of " + std::to_string(others) +
           " ranks have arrived";
  }
  return "scatter: " + std::to_string(others - static_cast<int>(outgoing_.size())) + " of " +
         std::to_string(others) + " blocks sent";
}

}  // namespace ringdl

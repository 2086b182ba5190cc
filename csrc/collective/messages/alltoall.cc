#include "collective/messages/alltoall.h"

#include <cstring>
#include <numeric>
#include <utility>

namespace ringdl {
namespace {

// Steps that may be under way at once on a rank. None waits forever: both ends of the oldest step
// that any rank has not finished have finished all steps before it, so both work on it.
constexpr size_t kOverlap = 8;

template <class Block>
bool advance(std::vector<Block>& blocks, size_t& done, Channel& channel) {
  for (size_t i = done; i < blocks.size() && i < done + kOverlap; ++i) {
    if (blocks[i].step(channel) && i == done) ++done;
  }
  return done == blocks.size();
}

std::vector<size_t> begins_of(const std::vector<int64_t>& lengths) {
  std::vector<size_t> begins(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), begins.begin() + 1,
                   [](size_t sum, int64_t length) { return sum + static_cast<size_t>(length); });
  return begins;
}

}  // namespace

Alltoall::Alltoall(Executor& executor, const std::byte* data, std::vector<int64_t> send_bytes,
                   int rank, int size, size_t segment_bytes)
    : executor_(executor),
      data_(data),
      send_bytes_(std::move(send_bytes)),
      rank_(rank),
      size_(size),
      segment_bytes_(segment_bytes) {
  result_.lengths.assign(static_cast<size_t>(size), -1);
  result_.lengths[static_cast<size_t>(rank)] = send_bytes_[static_cast<size_t>(rank)];
}

bool Alltoall::exchange_lengths(Channel& channel) {
  for (int s = 1; !lengths_begun_ && s < size_; ++s) {
    const int to = (rank_ + s) % size_;
    const int from = (rank_ - s + size_) % size_;
    channel.receive(from, &result_.lengths[static_cast<size_t>(from)], sizeof(int64_t));
    channel.send(to, &send_bytes_[static_cast<size_t>(to)], sizeof(int64_t));
  }
  lengths_begun_ = true;
  while (heard_ < size_ - 1 && channel.received((rank_ - heard_ - 1 + size_) % size_) > 0) ++heard_;
  return heard_ == size_ - 1;
}

void Alltoall::begin_blocks() {
  blocks_begun_ = true;
  const std::vector<size_t> sources = begins_of(send_bytes_);
  const std::vector<size_t> targets = begins_of(result_.lengths);
  const auto own = static_cast<size_t>(rank_);
  result_.data = Buffer(targets.back());
  copied_ = executor_.copy(result_.data.data() + targets[own], data_ + sources[own],
                           static_cast<size_t>(result_.lengths[own]));
  for (int s = 1; s < size_; ++s) {
    const int to = (rank_ + s) % size_;
    const int from = (rank_ - s + size_) % size_;
    outgoing_.emplace_back(to, 1, data_ + sources[static_cast<size_t>(to)],
                           static_cast<size_t>(send_bytes_[static_cast<size_t>(to)]),
                           segment_bytes_);
    incoming_.emplace_back(from, 1, result_.data.data() + targets[static_cast<size_t>(from)],
                           static_cast<size_t>(result_.lengths[static_cast<size_t>(from)]),
                           segment_bytes_);
  }
}

bool Alltoall::step(Channel& channel) {
  if (!blocks_begun_) {
    if (!exchange_lengths(channel)) return false;
    begin_blocks();
  }
  const bool arrived = advance(incoming_, in_, channel);
  return advance(outgoing_, out_, channel) && arrived && executor_.is_done(copied_);
}

std::string Alltoall::describe() const {
  const std::string others = " of " + std::to_string(size_ - 1);
  if (!blocks_begun_) return "alltoall: " + std::to_string(heard_) + others + " lengths received";
  return "alltoall: " + std::to_string(in_) + others + " blocks received, " + std::to_string(out_) +
         " sent";
}

}  // namespace ringdl

#include "collective/messages/bruck.h"

#include <algorithm>
#include <cstring>

#include "collective/algorithm.h"

namespace ringdl {

Bruck::Bruck(Executor& executor, const std::vector<size_t>& lengths, int rank, const void* own)
    : executor_(executor),
      rank_(rank),
      size_(static_cast<int>(lengths.size())),
      begins_(lengths.size() + 1, 0) {
  for (int i = 0; i < size_; ++i) {
    const auto at = static_cast<size_t>(i);
    begins_[at + 1] = begins_[at] + lengths[static_cast<size_t>((rank - i + size_) % size_)];
  }
  blocks_.resize(begins_.back());
  copied_ = executor_.copy(blocks_.data(), static_cast<const std::byte*>(own), begins_[1]);
}

// A round sends the first blocks and appends those that it receives: both ends count the blocks
// from their own one backwards.
bool Bruck::step(Channel& channel) {
  if (!executor_.is_done(copied_)) return false;
  bool all_sent = true;
  for (OutgoingBlock& block : outgoing_) all_sent &= block.step(channel);
  while (here_ < size_) {
    const int count = std::min(here_, size_ - here_);
    if (rounds_ == incoming_.size()) {
      const size_t here = begins_[static_cast<size_t>(here_)];
      incoming_.emplace_back((rank_ - here_ + size_) % size_, 0, blocks_.data() + here,
                             begins_[static_cast<size_t>(here_ + count)] - here, kOneMessageBytes);
      outgoing_.emplace_back((rank_ + here_) % size_, 0, blocks_.data(),
                             begins_[static_cast<size_t>(count)], kOneMessageBytes);
      all_sent &= outgoing_.back().step(channel);
    }
    if (!incoming_.back().step(channel)) return false;
    here_ += count;
    ++rounds_;
  }
  return all_sent;
}

std::string Bruck::describe() const {
  return std::to_string(here_) + " of " + std::to_string(size_) + " blocks have arrived";
}

}  // namespace ringdl

#include "collective/recursive_doubling.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ringdl {

// With F the largest power of two that is at most P, the first 2(P-F) ranks are pairs of an even
// rank, which hands its array in, and an odd one, which adds it. The F ranks that are left are
// numbered in order. In round k they are taken in blocks of 2^(k+1): each exchanges with its mirror
// image in the block, after which a block has the same bits. So every edge carries at most one
// message in each direction, and who is next to whom in the order meets in some round: the header
// for the next rank goes with a message that is sent anyway, but for the edges to the pairs.
//
// combine() writes its left operand, which must be the lower rank's: the lower one adds into the
// array that it has, once that has left; the higher one into the slot that it has received, which
// becomes what it has.

RecursiveDoubling::RecursiveDoubling(std::byte* data, size_t bytes, Reducer reducer, int rank,
                                     int size)
    : data_(data),
      bytes_(bytes),
      reducer_(reducer),
      rank_(rank),
      size_(size),
      slot_bytes_((bytes + 63) / 64 * 64),
      current_(data) {
  const int full = static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
  const int extra = size - full;
  const bool paired = rank < 2 * extra;
  hands_in_ = paired && rank % 2 == 0;
  hands_out_ = paired && rank % 2 == 1;
  if (hands_in_) return;
  if (hands_out_) partners_.push_back(rank - 1);
  const int number = paired ? rank / 2 : rank - extra;
  for (int bit = 1; bit < full; bit *= 2) {
    const int other = number ^ (2 * bit - 1);
    partners_.push_back(other < extra ? 2 * other + 1 : other + extra);
  }
  scratch_ = Buffer(partners_.size() * slot_bytes_);
}

void RecursiveDoubling::prepare(Channel& channel) {
  prepared_ = true;
  for (size_t round = 0; round < partners_.size(); ++round) {
    channel.receive(partners_[round], slot(round), bytes_);
  }
}

bool RecursiveDoubling::greets_next() const {
  const int next = (rank_ + 1) % size_;
  if (hands_in_) return true;
  return std::find(partners_.begin(), partners_.end(), next) != partners_.end();
}

bool RecursiveDoubling::hand_in(Channel& channel) {
  const int neighbour = rank_ + 1;
  if (!launched_) channel.send(neighbour, data_, bytes_);
  launched_ = true;
  if (channel.sent(neighbour) == 0) return false;
  if (!collects_) channel.receive(neighbour, data_, bytes_);
  collects_ = true;
  return channel.received(neighbour) == 1;
}

bool RecursiveDoubling::exchange(Channel& channel) {
  while (round_ < partners_.size()) {
    const int partner = partners_[round_];
    const bool handed_in = hands_out_ && round_ == 0;
    if (!launched_ && !handed_in) channel.send(partner, current_, bytes_);
    launched_ = true;
    if (channel.received(partner) == 0) return false;
    if (rank_ < partner && channel.sent(partner) == 0) return false;
    std::byte* const theirs = slot(round_);
    std::byte* const left = partner < rank_ ? theirs : current_;
    const std::byte* const right = partner < rank_ ? current_ : theirs;
    ++round_;
    if (round_ == partners_.size()) {
      reducer_.finish(left, right, bytes_);
    } else {
      reducer_.combine(left, right, bytes_);
    }
    current_ = left;
    launched_ = false;
  }
  return true;
}

bool RecursiveDoubling::hand_out(Channel& channel) {
  if (hands_out_ && !launched_) channel.send(rank_ - 1, current_, bytes_);
  launched_ = true;
  for (const int partner : partners_) {
    if (channel.sent(partner) == 0) return false;
  }
  if (current_ != data_ && bytes_ > 0) std::memcpy(data_, current_, bytes_);
  return true;
}

bool RecursiveDoubling::step(Channel& channel) {
  if (size_ == 1) return true;
  if (!prepared_) prepare(channel);
  if (hands_in_) return hand_in(channel);
  return exchange(channel) && hand_out(channel);
}

std::string RecursiveDoubling::describe() const {
  if (hands_in_) {
    return "recursive doubling: waits for the result from rank " + std::to_string(rank_ + 1);
  }
  std::string text = "recursive doubling: " + std::to_string(round_) + " of " +
                     std::to_string(partners_.size()) + " rounds complete";
  if (round_ < partners_.size()) text += ", waits for rank " + std::to_string(partners_[round_]);
  return text;
}

}  // namespace ringdl

#include "collective/messages/recursive_doubling.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <ranges>

namespace ringdl {

// Let F be the largest power of two that is at most P. The first 2(P-F) ranks form pairs of an even
// rank, which hands its array in, and an odd one, which adds it. The F remaining ranks are numbered
// in order. Round k takes them in blocks of 2^(k+1): each exchanges with its mirror image in the
// block, after which all of the block have the same bits. So every edge carries an array at most
// once in each direction, and neighbours in the order meet in some round: the header for the
// next rank is sent with a message that is sent anyway, except on the edges to the pairs.
//
// combine() writes its left operand, which must be the lower rank's. So the lower rank adds into
// its array, once that has left; the higher rank adds into the slot that it has received, which
// becomes its array.

RecursiveDoubling::RecursiveDoubling(Executor& executor, std::byte* data, size_t bytes,
                                     Reducer reducer, int rank, int size, size_t segment_bytes)
    : executor_(executor),
      data_(data),
      bytes_(bytes),
      reducer_(reducer),
      rank_(rank),
      size_(size),
      segment_bytes_(segment_bytes),
      segments_(
          std::max<int64_t>(1, static_cast<int64_t>((bytes + segment_bytes - 1) / segment_bytes))),
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
  posted_.assign(partners_.size(), 0);
}

void RecursiveDoubling::prepare(Channel& channel) {
  prepared_ = true;
  for (size_t round = 0; round < partners_.size(); ++round) {
    receive_more(channel, partners_[round], slot(round), posted_[round]);
  }
}

void RecursiveDoubling::send_more(Channel& channel, int to, const std::byte* data) {
  for (; launched_ < segments_ && launched_ < channel.sent(to) + 2 * kDepth; ++launched_) {
    const size_t begin = static_cast<size_t>(launched_) * segment_bytes_;
    channel.send(to, data + begin, std::min(segment_bytes_, bytes_ - begin));
  }
}

void RecursiveDoubling::receive_more(Channel& channel, int from, std::byte* data,
                                     int64_t& posted) const {
  for (; posted < segments_ && posted < channel.received(from) + kDepth; ++posted) {
    const size_t begin = static_cast<size_t>(posted) * segment_bytes_;
    channel.receive(from, data + begin, std::min(segment_bytes_, bytes_ - begin));
  }
}

bool RecursiveDoubling::greets_next() const {
  const int next = (rank_ + 1) % size_;
  if (hands_in_) return true;
  return std::find(partners_.begin(), partners_.end(), next) != partners_.end();
}

bool RecursiveDoubling::hand_in(Channel& channel) {
  const int neighbour = rank_ + 1;
  send_more(channel, neighbour, data_);
  if (!has_sent(channel, neighbour)) return false;
  receive_more(channel, neighbour, data_, collected_);
  return has_received(channel, neighbour);
}

bool RecursiveDoubling::exchange(Channel& channel) {
  while (round_ < partners_.size()) {
    if (!executor_.is_done(combined_)) return false;
    const int partner = partners_[round_];
    const bool handed_in = hands_out_ && round_ == 0;
    if (!handed_in) send_more(channel, partner, current_);
    receive_more(channel, partner, slot(round_), posted_[round_]);
    if (!has_received(channel, partner)) return false;
    if (!handed_in && launched_ < segments_) return false;
    if (rank_ < partner && !has_sent(channel, partner)) return false;
    std::byte* const theirs = slot(round_);
    std::byte* const left = partner < rank_ ? theirs : current_;
    const std::byte* const right = partner < rank_ ? current_ : theirs;
    ++round_;
    combined_ = round_ == partners_.size() ? executor_.finish(reducer_, left, right, bytes_)
                                           : executor_.combine(reducer_, left, right, bytes_);
    current_ = left;
    launched_ = 0;
  }
  return executor_.is_done(combined_);
}

bool RecursiveDoubling::hand_out(Channel& channel) {
  if (hands_out_) send_more(channel, rank_ - 1, current_);
  for (const int partner : partners_) {
    if (!has_sent(channel, partner)) return false;
  }
  if (current_ != data_ && !copies_) {
    copies_ = true;
    combined_ = executor_.copy(data_, current_, bytes_);
  }
  return executor_.is_done(combined_);
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

// Chosen for arrays that fit into one message. If the number of ranks is no power of two, there is
// one more step at each end.
constinit const AllreduceAlgorithm kDoublingAlgorithm = {
    .id = Algorithm::kDoubling,
    .name = "doubling",
    .ranks = "any ranks",
    .can_run = [](const HostLayout&) { return true; },
    .most_bytes = [](size_t segment_bytes) { return std::max(kOneMessageBytes, segment_bytes); },
    .effort =
        [](double bytes, const HostLayout& layout) {
          const auto size = static_cast<unsigned>(layout.size());
          const int rounds = std::bit_width(size) - 1 + (std::has_single_bit(size) ? 0 : 2);
          if (layout.host_count() == 1) return Effort{double(rounds), rounds * bytes};
          // Ranks of a host follow one another. Their first partners are there, if hosts have
          // equally many, a power of two; else, and later, all of them send over its link.
          const auto [least, most] = std::ranges::minmax(
              layout.hosts | std::views::transform([](const auto& ranks) { return ranks.size(); }));
          const int inside =
              least == most && std::has_single_bit(most) ? std::bit_width(most) - 1 : 0;
          return Effort{double(rounds), (rounds - inside) * static_cast<double>(most) * bytes};
        },
    .inside = {12e-6, 0.4e-9},
    .between = {30e-6, 8e-9},
    .make = [](const AllreduceArguments& its) -> std::unique_ptr<Collective> {
      return std::make_unique<RecursiveDoubling>(its.executor, its.data, its.bytes, its.reducer,
                                                 its.rank, its.size,
                                                 std::max(kOneMessageBytes, its.segment_bytes));
    }};

}  // namespace ringdl

#include "collective/allgather.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "collective/ring_blocks.h"

namespace ringdl {
namespace {

std::vector<int> all_ranks(size_t size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Allgather::Allgather(const std::byte* block, size_t bytes, std::vector<int> order, int rank,
                     size_t segment_bytes, std::optional<Levels> levels)
    : block_(block),
      order_(std::move(order)),
      rank_(rank),
      size_(static_cast<int>(order_.size())),
      segment_bytes_(segment_bytes),
      levels_(std::move(levels)),
      after_lengths_(all_ranks(order_.size()), rank) {
  result_.lengths.assign(order_.size(), -1);
  result_.lengths[place_of(rank)] = static_cast<int64_t>(bytes);
}

// Each rank first sends its own length and then passes on what it received, so the m-th that it
// sends is the (m-1)-th received; the last one received is not passed on.
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
  return size_ == 1 || (channel.received(previous) == size_ - 1 && channel.sent(next) == size_ - 1);
}

void Allgather::begin_blocks() {
  size_t total = 0;
  std::vector<Span> in_result;
  for (const int64_t length : result_.lengths) {
    in_result.push_back({total, static_cast<size_t>(length)});
    total += static_cast<size_t>(length);
  }
  std::vector<Span> blocks;
  for (const int place : order_) blocks.push_back(in_result[static_cast<size_t>(place)]);
  result_.data = Buffer(total);
  std::byte* const data = result_.data.data();
  const Span& own = blocks[static_cast<size_t>(rank_)];
  if (own.bytes > 0) std::memcpy(data + own.begin, block_, own.bytes);
  if (levels_ && total >= Levels::kLeastBytes) {
    blocks_ =
        std::make_unique<TwoLevelBlocks>(*levels_, data, std::move(blocks), rank_, segment_bytes_);
  } else {
    blocks_ = std::make_unique<RingBlocks>(data, blocks, rank_, segment_bytes_);
  }
}

bool Allgather::step(Channel& channel) {
  if (!blocks_) {
    if (!gather_lengths(channel)) return false;
    begin_blocks();
    after_lengths_.begin(channel);
  }
  after_lengths_.use(channel);
  return blocks_->step(after_lengths_);
}

std::string Allgather::describe() const {
  if (!blocks_) return "allgather: lengths not known yet";
  return "allgather: " + blocks_->describe();
}

}  // namespace ringdl

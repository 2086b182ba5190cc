#include "collective/two_level/allgather.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "collective/messages/ring_blocks.h"

namespace ringdl {
namespace {

std::vector<int> all_ranks(size_t size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Allgather::Allgather(const std::byte* block, size_t bytes, std::vector<int> order, int rank,
                     size_t segment_bytes, size_t few_bytes, std::optional<Levels> levels)
    : block_(block),
      order_(std::move(order)),
      rank_(rank),
      size_(static_cast<int>(order_.size())),
      segment_bytes_(segment_bytes),
      few_bytes_(few_bytes),
      levels_(std::move(levels)),
      entries_(std::vector<size_t>(order_.size(), sizeof(Entry)), rank,
               entry_of(block, bytes).data()),
      after_lengths_(all_ranks(order_.size()), rank) {}

Allgather::Entry Allgather::entry_of(const std::byte* block, size_t bytes) {
  Entry entry{};
  const auto length = static_cast<int64_t>(bytes);
  std::memcpy(entry.data(), &length, sizeof(length));
  if (bytes > 0) std::memcpy(entry.data() + sizeof(length), block, std::min(bytes, kHeadBytes));
  return entry;
}

// All lengths are here. Whether all blocks are, too.
bool Allgather::begin(Channel& channel) {
  result_.lengths.resize(order_.size());
  std::vector<size_t> lengths;  // by rank
  for (int rank = 0; rank < size_; ++rank) {
    int64_t length = 0;
    std::memcpy(&length, entries_.block(rank), sizeof(length));
    result_.lengths[place_of(rank)] = length;
    lengths.push_back(static_cast<size_t>(length));
  }
  size_t total = 0;
  std::vector<Span> in_result;
  for (const int64_t length : result_.lengths) {
    in_result.push_back({total, static_cast<size_t>(length)});
    total += static_cast<size_t>(length);
  }
  for (const int place : order_) spans_.push_back(in_result[static_cast<size_t>(place)]);
  result_.data = Buffer(total);
  std::byte* const data = result_.data.data();
  if (std::ranges::all_of(lengths, [](size_t length) { return length <= kHeadBytes; })) {
    take([this](int rank) { return entries_.block(rank) + sizeof(int64_t); });
    return true;
  }
  if (total <= few_bytes_) {
    auto rounds = std::make_unique<Bruck>(lengths, rank_, block_);
    rounds_ = rounds.get();
    blocks_ = std::move(rounds);
  } else {
    const Span& own = spans_[static_cast<size_t>(rank_)];
    if (own.bytes > 0) std::memcpy(data + own.begin, block_, own.bytes);
    if (levels_ && total >= Levels::kLeastBytes) {
      blocks_ = std::make_unique<TwoLevelBlocks>(*levels_, data, spans_, rank_, segment_bytes_);
    } else {
      blocks_ = std::make_unique<RingBlocks>(data, spans_, rank_, segment_bytes_);
    }
  }
  after_lengths_.begin(channel);
  return false;
}

void Allgather::take(const std::function<const std::byte*(int)>& block_of) {
  for (int rank = 0; rank < size_; ++rank) {
    const Span& span = spans_[static_cast<size_t>(rank)];
    if (span.bytes > 0) std::memcpy(result_.data.data() + span.begin, block_of(rank), span.bytes);
  }
}

bool Allgather::step(Channel& channel) {
  if (!has_begun_) {
    if (!entries_.step(channel)) return false;
    has_begun_ = true;
    if (begin(channel)) return true;
  }
  after_lengths_.use(channel);
  if (!blocks_->step(after_lengths_)) return false;
  if (rounds_ != nullptr) take([this](int rank) { return rounds_->block(rank); });
  return true;
}

std::string Allgather::describe() const {
  if (blocks_) return "allgather: " + blocks_->describe();
  return "allgather: the lengths of " + entries_.describe();
}

}  // namespace ringdl

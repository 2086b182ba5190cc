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

Allgather::Allgather(Executor& executor, const std::byte* block, size_t bytes,
                     std::vector<int> order, int rank, size_t segment_bytes, size_t few_bytes,
                     std::optional<Levels> levels)
    : executor_(executor),
      block_(block),
      order_(std::move(order)),
      rank_(rank),
      size_(static_cast<int>(order_.size())),
      segment_bytes_(segment_bytes),
      few_bytes_(few_bytes),
      levels_(std::move(levels)),
      after_lengths_(all_ranks(order_.size()), rank) {
  const auto length = static_cast<int64_t>(bytes);
  std::memcpy(entry_.data(), &length, sizeof(length));
}

bool Allgather::collect_entries(Channel& channel) {
  if (!has_head_) {
    int64_t length = 0;
    std::memcpy(&length, entry_.data(), sizeof(length));
    copied_ = executor_.copy(entry_.data() + sizeof(length), block_,
                             std::min(static_cast<size_t>(length), kHeadBytes));
    has_head_ = true;
  }
  if (!entries_) {
    if (!executor_.is_done(copied_)) return false;
    entries_.emplace(cpu_executor(), std::vector<size_t>(order_.size(), sizeof(Entry)), rank_,
                     entry_.data());
  }
  return entries_->step(channel);
}

// All lengths have arrived.
void Allgather::begin() {
  result_.lengths.resize(order_.size());
  std::vector<size_t> lengths;  // by rank
  for (int rank = 0; rank < size_; ++rank) {
    int64_t length = 0;
    std::memcpy(&length, entries_->block(rank), sizeof(length));
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
  follow_ = std::ranges::any_of(lengths, [](size_t length) { return length > kHeadBytes; });
  if (!follow_) return;
  if (total <= few_bytes_) {
    auto rounds = std::make_unique<Bruck>(executor_, lengths, rank_, block_);
    rounds_ = rounds.get();
    blocks_ = std::move(rounds);
    return;
  }
  const Span& own = spans_[static_cast<size_t>(rank_)];
  copied_ = executor_.copy(data + own.begin, block_, own.bytes);
  if (levels_ && total >= Levels::kLeastBytes) {
    blocks_ =
        std::make_unique<TwoLevelBlocks>(executor_, *levels_, data, spans_, rank_, segment_bytes_);
  } else {
    blocks_ = std::make_unique<RingBlocks>(data, spans_, rank_, segment_bytes_);
  }
}

void Allgather::take(const std::function<const std::byte*(int)>& block_of) {
  for (int rank = 0; rank < size_; ++rank) {
    const Span& span = spans_[static_cast<size_t>(rank)];
    copied_ = std::max(
        copied_, executor_.copy(result_.data.data() + span.begin, block_of(rank), span.bytes));
  }
}

bool Allgather::step(Channel& channel) {
  if (!has_begun_) {
    if (!collect_entries(channel)) return false;
    has_begun_ = true;
    begin();
    if (follow_) after_lengths_.begin(channel);
  }
  if (!executor_.is_done(copied_)) return false;
  if (has_taken_) return true;
  if (follow_) {
    after_lengths_.use(channel);
    if (!blocks_->step(after_lengths_)) return false;
    if (rounds_ == nullptr) return true;
    take([this](int rank) { return rounds_->block(rank); });
  } else {
    take([this](int rank) { return entries_->block(rank) + sizeof(int64_t); });
  }
  has_taken_ = true;
  return executor_.is_done(copied_);
}

std::string Allgather::describe() const {
  if (blocks_) return "allgather: " + blocks_->describe();
  const std::string here = entries_ ? entries_->describe() : "no blocks have arrived";
  return "allgather: the lengths of " + here;
}

}  // namespace ringdl

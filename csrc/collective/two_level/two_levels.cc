#include "collective/two_level/two_levels.h"

#include <algorithm>
#include <utility>

namespace ringdl {

std::vector<int> Levels::lane_of(int rank) const {
  std::vector<int> lane;
  for (int host = 0; host < hosts(); ++host) lane.push_back(host * per_host + rank % per_host);
  return lane;
}

std::vector<int> Levels::local_ranks(int rank) const {
  std::vector<int> local;
  for (int i = 0; i < per_host; ++i) local.push_back(rank / per_host * per_host + i);
  return local;
}

std::unique_ptr<HostExchange> Levels::exchange(Executor& executor, const char* name, int rank,
                                               Exchange what) const {
  std::vector<int> numbers;
  for (const int local : local_ranks(rank)) numbers.push_back(ranks[static_cast<size_t>(local)]);
  return std::make_unique<HostExchange>(executor, name, window, std::move(numbers), rank % per_host,
                                        std::move(what));
}

namespace {

std::vector<Span> those_of(const std::vector<Span>& spans, const std::vector<int>& ranks) {
  std::vector<Span> chosen;
  for (const int rank : ranks) chosen.push_back(spans[static_cast<size_t>(rank)]);
  return chosen;
}

}  // namespace

TwoLevelBlocks::TwoLevelBlocks(Executor& executor, Levels levels, std::byte* data,
                               std::vector<Span> blocks, int rank, size_t segment_bytes)
    : executor_(executor),
      levels_(std::move(levels)),
      data_(data),
      blocks_(std::move(blocks)),
      rank_(rank),
      lane_(levels_.lane_of(rank), rank / levels_.per_host),
      local_(levels_.local_ranks(rank), rank % levels_.per_host),
      ring_(data, those_of(blocks_, levels_.lane_of(rank)), rank / levels_.per_host,
            segment_bytes) {}

// The ring and the exchanges have no edge in common, so the exchanges wait for the ring only for
// what it delivers: the blocks of the hosts before this one, backwards.
bool TwoLevelBlocks::step(Channel& channel) {
  if (!has_begun_) {
    has_begun_ = true;
    lane_.begin(channel);
  }
  lane_.use(channel);
  local_.use(channel);
  if (!ring_is_done_) ring_is_done_ = ring_.step(lane_);
  while (exchanged_ < levels_.hosts() && exchanged_ <= ring_.blocks_here()) {
    if (!exchange_) {
      const int own = rank_ / levels_.per_host;
      exchange_ = exchange_of((own - exchanged_ + levels_.hosts()) % levels_.hosts());
      local_.begin(channel);
    }
    if (!exchange_->step(local_)) return false;
    moved_ += exchange_->pieces() + 1;
    exchange_.reset();
    ++exchanged_;
  }
  return ring_is_done_ && exchanged_ == levels_.hosts();
}

std::unique_ptr<HostExchange> TwoLevelBlocks::exchange_of(int host) const {
  Exchange exchange;
  for (int i = 0; i < levels_.per_host; ++i) {
    const Span& block = blocks_[static_cast<size_t>(host * levels_.per_host + i)];
    exchange.begins.push_back(block.begin);
    if (i != rank_ % levels_.per_host) continue;
    exchange.data = data_ + block.begin;
    exchange.bytes = block.bytes;
  }
  exchange.parts.assign(static_cast<size_t>(levels_.per_host), {0, exchange.bytes});
  exchange.parts[static_cast<size_t>(rank_ % levels_.per_host)] = {};  // it is in place
  exchange.is_same = true;
  exchange.output = data_;
  return levels_.exchange(executor_, "allgather", rank_, std::move(exchange));
}

int64_t TwoLevelBlocks::pieces() const {
  return moved_ + (exchange_ ? std::max<int64_t>(exchange_->pieces(), 0) : 0);
}

std::string TwoLevelBlocks::describe() const {
  return ring_.describe() + " from other hosts, the blocks of " + std::to_string(exchanged_) +
         " of " + std::to_string(levels_.hosts()) + " hosts have arrived";
}

TwoLevelReduceScatter::TwoLevelReduceScatter(Executor& executor, Levels levels,
                                             const std::byte* data, std::byte* output,
                                             std::vector<Span> chunks, ReduceMany reduce_many,
                                             Reducer reducer, int rank, size_t segment_bytes)
    : executor_(executor),
      levels_(std::move(levels)),
      data_(data),
      output_(output),
      chunks_(std::move(chunks)),
      reduce_many_(reduce_many),
      reducer_(reducer),
      rank_(rank),
      segment_bytes_(segment_bytes),
      lane_(levels_.lane_of(rank), rank / levels_.per_host),
      local_(levels_.local_ranks(rank), rank % levels_.per_host) {
  size_t total = 0;
  for (const Span& chunk : those_of(chunks_, levels_.lane_of(rank))) {
    lane_chunks_.push_back({total, chunk.bytes});
    total += chunk.bytes;
  }
  sums_ = Buffer(total);
}

bool TwoLevelReduceScatter::step(Channel& channel) {
  if (!all_agree_) all_agree_ = barrier_.step(channel);
  if (!all_agree_) return false;
  if (reduced_ < levels_.hosts() && !reduce_on_host(channel)) return false;
  if (!ring_) {
    ring_.emplace(executor_, sums_.data(), output_, lane_chunks_, reducer_,
                  rank_ / levels_.per_host, segment_bytes_);
    lane_.begin(channel);
  }
  lane_.use(channel);
  return ring_->step(lane_);
}

bool TwoLevelReduceScatter::reduce_on_host(Channel& channel) {
  local_.use(channel);
  for (; reduced_ < levels_.hosts(); ++reduced_) {
    if (!exchange_) {
      Exchange exchange;
      exchange.data = data_;
      for (const Span& chunk : chunks_) exchange.bytes += chunk.bytes;
      exchange.parts = those_of(chunks_, levels_.local_ranks(reduced_ * levels_.per_host));
      exchange.reduce_many = reduce_many_;
      exchange.output = sums_.data() + lane_chunks_[static_cast<size_t>(reduced_)].begin;
      exchange_ = levels_.exchange(executor_, "reducescatter", rank_, std::move(exchange));
      local_.begin(channel);
    }
    if (!exchange_->step(local_)) return false;
    moved_ += exchange_->pieces() + 1;
    exchange_.reset();
  }
  return true;
}

int64_t TwoLevelReduceScatter::pieces() const {
  if (!all_agree_) return -1;
  return moved_ + (exchange_ ? std::max<int64_t>(exchange_->pieces(), 0) : 0);
}

std::string TwoLevelReduceScatter::describe() const {
  if (!all_agree_) return "reducescatter: " + barrier_.describe();
  if (ring_) return ring_->describe();
  return "reducescatter: the chunks of " + std::to_string(reduced_) + " of " +
         std::to_string(levels_.hosts()) + " hosts are reduced on this one" +
         (exchange_ ? ", " + exchange_->describe() : "");
}

}  // namespace ringdl

#include "collective/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "reduce/stream.h"

namespace ringdl {
namespace {

// A place in a stage is so large: a block should be worth a wait for the others, and what is in a
// stage be read before it leaves the caches, if it is there.
constexpr size_t kPlaceBytes = 256 << 10;
constexpr size_t kSmallestBlock = 16 << 10;
constexpr uint64_t kPlaces = 2;

// So much at most in one step(): a fraction of a millisecond, in which the engine's lock is held.
constexpr size_t kBytesPerStep = 1 << 20;

constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

size_t block_bytes_of(bool is_same, size_t size) {
  if (is_same || size < 3) return kPlaceBytes;
  return std::max(kSmallestBlock, kPlaceBytes / (size - 1) / 64 * 64);
}

}  // namespace

HostExchange::HostExchange(std::string name, std::shared_ptr<Window> window, std::vector<int> ranks,
                           int rank, Exchange exchange)
    : name_(std::move(name)),
      window_(std::move(window)),
      ranks_(std::move(ranks)),
      rank_(rank),
      exchange_(std::move(exchange)),
      block_bytes_(block_bytes_of(exchange_.is_same, ranks_.size())),
      told_(ranks_.size()),
      places_(ranks_.size()) {
  const auto offset = window_->offset_of(exchange_.data, exchange_.bytes);
  for (size_t to = 0; to < told_.size(); ++to) {
    told_[to].bytes = static_cast<int64_t>(exchange_.parts[to].bytes);
    if (offset) told_[to].begin = static_cast<int64_t>(*offset + exchange_.parts[to].begin);
  }
  if (!offset) find_stage();
  if (rank_ != 0) return;
  const size_t bytes = SharedCounters::bytes(size());
  counters_ = window_->allocate(bytes);
  std::memset(counters_.get(), 0, bytes);
  const auto counters = static_cast<int64_t>(*window_->offset_of(counters_.get(), bytes));
  for (Place& place : told_) place.counters = counters;
}

// Other ranks look at the counters once all have told where their arrays are, which is known here,
// too, or will be.
HostExchange::~HostExchange() {
  if (has_met_) leave();
}

void HostExchange::leave() {
  stage_.reset();
  if (!counters_) return;
  const SharedCounters counters(counters_.get(), size());
  window_->free_once(std::move(counters_), counters.left(), static_cast<uint64_t>(size()));
}

uint64_t HostExchange::blocks(int64_t bytes) const {
  return (static_cast<uint64_t>(bytes) + block_bytes_ - 1) / block_bytes_;
}

size_t HostExchange::block_length(int64_t bytes, uint64_t block) const {
  return std::min(block_bytes_, static_cast<size_t>(bytes) - block * block_bytes_);
}

std::byte* HostExchange::at(int source, int64_t offset) const {
  return window_->at(ranks_[static_cast<size_t>(source)], static_cast<uint64_t>(offset));
}

// A place has room for a block of each other rank's part; for one if all take the same.
void HostExchange::find_stage() {
  int64_t longest = 0;
  for (int to = 0; to < size(); ++to) {
    if (to != rank_) longest = std::max(longest, told_[static_cast<size_t>(to)].bytes);
  }
  stage_blocks_ = blocks(longest);
  if (stage_blocks_ == 0) return;
  lane_bytes_ = exchange_.is_same ? 0 : (block_length(longest, 0) + 63) / 64 * 64;
  stride_ = exchange_.is_same ? (block_length(longest, 0) + 63) / 64 * 64
                              : lane_bytes_ * static_cast<size_t>(size() - 1);
  stage_ = window_->allocate(stride_ * std::min(stage_blocks_, kPlaces));
  const uint64_t offset = *window_->offset_of(stage_.get(), 1);
  for (int to = 0; to < size(); ++to) {
    Place& place = told_[static_cast<size_t>(to)];
    place.begin = static_cast<int64_t>(offset + lane_begin(to));
    place.stride = static_cast<int64_t>(stride_);
  }
}

// Each rank takes block after block of what the others have for it. What it has taken it counts in
// copied(rank), where a source that has no more blocks holds up nobody. Block b comes into a stage,
// and is counted in ready(rank), once all have counted those before b-1, whose place it takes. So
// of the ranks that have counted least one can always go on: what it waits for, block m of some
// rank, can come there, as all have counted m blocks.
bool HostExchange::step(Channel& channel) {
  if (!has_told_) tell(channel);
  if (!has_met_) {
    if (!has_heard_all(channel)) return false;
    begin();
  }
  const int64_t before = moved_;
  while (static_cast<size_t>(moved_ - before) * block_bytes_ < kBytesPerStep) {
    const bool has_moved = copy_in();
    if (!take() && !has_moved) break;
  }
  for (int source = 0; source < size(); ++source) {
    if (taken_[static_cast<size_t>(source)] < blocks(place(source).bytes)) return false;
  }
  if (!all_have_taken_their_parts()) return false;
  for (int to = 0; to < size(); ++to) {
    if (to != rank_ && channel.sent(to) < 1) return false;
  }
  shared_.left().fetch_add(1, std::memory_order_release);
  leave();
  return true;
}

// What fits into the stage is there before it is told where that is.
void HostExchange::tell(Channel& channel) {
  while (in_ < std::min(stage_blocks_, kPlaces)) copy_in();
  for (int other = 0; other < size(); ++other) {
    if (other == rank_) continue;
    Place& place = told_[static_cast<size_t>(other)];
    place.blocks_in = static_cast<int64_t>(in_);
    channel.send(other, &place, sizeof(place));
    channel.receive(other, &places_[static_cast<size_t>(other)], sizeof(Place));
  }
  places_[static_cast<size_t>(rank_)] = told_[static_cast<size_t>(rank_)];
  has_told_ = true;
}

bool HostExchange::has_heard_all(Channel& channel) {
  heard_ = 0;
  for (int rank = 0; rank < size(); ++rank) {
    heard_ += static_cast<int>(rank == rank_ || channel.received(rank) > 0);
  }
  return heard_ == size();
}

void HostExchange::begin() {
  has_met_ = true;
  shared_ = SharedCounters(at(0, place(0).counters), size());
  taken_.assign(ranks_.size(), 0);
  size_t total = 0;
  begins_ = exchange_.begins;
  for (const Place& place : places_) {
    if (exchange_.begins.empty()) begins_.push_back(exchange_.join ? 0 : total);
    there_.push_back(place.stride == 0 ? kAll : static_cast<uint64_t>(place.blocks_in));
    result_.lengths.push_back(place.bytes);
    total += static_cast<size_t>(place.bytes);
  }
  there_[static_cast<size_t>(rank_)] = kAll;
  if (exchange_.output == nullptr) result_.data = Buffer(total);
  output_ = exchange_.output == nullptr ? result_.data.data() : exchange_.output;
  streams_ = (exchange_.join ? static_cast<size_t>(place(0).bytes) : total) >= kStreamBytes;
  tell_taken();
}

// Past the caches: between cores without a common one, lines that another core has just written
// come slowly, and a broadcast of 64 MiB took 32 ms, not 8. Small parts that are reduced are better
// off in the caches.
bool HostExchange::copy_in() {
  if (in_ == stage_blocks_ || (in_ >= kPlaces && !all_have_taken(in_ - kPlaces + 1))) return false;
  std::byte* const into = stage_.get() + in_ % kPlaces * stride_;
  const size_t begin = in_ * block_bytes_;
  for (int to = 0; to < size(); ++to) {
    const Span& part = exchange_.parts[static_cast<size_t>(to)];
    if (to == rank_ || begin >= part.bytes) continue;
    const std::byte* const from = exchange_.data + part.begin + begin;
    const size_t length = std::min(block_bytes_, part.bytes - begin);
    copy_bytes(into + lane_begin(to), from, length, !exchange_.join || part.bytes >= kStreamBytes);
    if (exchange_.is_same) break;
  }
  stream_fence();
  ++in_;
  ++moved_;
  if (has_met_) shared_.ready(rank_).store(in_, std::memory_order_release);
  return true;
}

// One block of each rank, or, if they are reduced, of all.
bool HostExchange::take() {
  bool has_moved = false;
  if (exchange_.join) {
    has_moved = reduce_next();
  } else {
    for (int i = 0; i < size(); ++i) has_moved |= take_from((rank_ + i) % size());
    if (streams_ && has_moved) stream_fence();
  }
  if (has_moved) tell_taken();
  return has_moved;
}

bool HostExchange::take_from(int source) {
  uint64_t& taken = taken_[static_cast<size_t>(source)];
  const int64_t bytes = place(source).bytes;
  if (taken == blocks(bytes) || !is_there(source, taken)) return false;
  copy_bytes(output_ + begins_[static_cast<size_t>(source)] + taken * block_bytes_,
             source_of(source, taken), block_length(bytes, taken), streams_);
  ++taken;
  ++moved_;
  return true;
}

bool HostExchange::reduce_next() {
  const uint64_t block = taken_[0];
  const int64_t bytes = place(0).bytes;
  if (block == blocks(bytes)) return false;
  std::vector<const std::byte*> sources;
  for (int source = 0; source < size(); ++source) {
    if (!is_there(source, block)) return false;
    sources.push_back(source_of(source, block));
  }
  std::byte* const target = output_ + block * block_bytes_;
  (*exchange_.join)(sources, {&target, 1}, block_length(bytes, block), streams_);
  for (uint64_t& taken : taken_) ++taken;
  ++moved_;
  return true;
}

bool HostExchange::is_there(int source, uint64_t block) {
  uint64_t& there = there_[static_cast<size_t>(source)];
  if (there <= block) {
    there = std::max(there, shared_.ready(source).load(std::memory_order_acquire));
  }
  return there > block;
}

const std::byte* HostExchange::source_of(int source, uint64_t block) const {
  const Place& from = place(source);
  if (source == rank_) {
    return exchange_.data + exchange_.parts[static_cast<size_t>(rank_)].begin +
           block * block_bytes_;
  }
  const std::byte* const begin = at(source, from.begin);
  if (from.stride == 0) return begin + block * block_bytes_;
  return begin + block % kPlaces * static_cast<size_t>(from.stride);
}

void HostExchange::tell_taken() {
  uint64_t least = kAll;
  for (int source = 0; source < size(); ++source) {
    const uint64_t taken = taken_[static_cast<size_t>(source)];
    if (source != rank_ && taken < blocks(place(source).bytes)) least = std::min(least, taken);
  }
  shared_.copied(rank_).store(least, std::memory_order_release);
}

bool HostExchange::all_have_taken(uint64_t blocks) {
  if (all_have_taken_ >= blocks) return true;
  all_have_taken_ = shared_.least_of_others(rank_, &SharedCounters::copied);
  return all_have_taken_ >= blocks;
}

bool HostExchange::all_have_taken_their_parts() {
  for (int rank = 0; rank < size(); ++rank) {
    const uint64_t part = blocks(told_[static_cast<size_t>(rank)].bytes);
    if (rank != rank_ && shared_.copied(rank).load(std::memory_order_acquire) < part) return false;
  }
  return true;
}

std::string HostExchange::describe() const {
  const std::string text = name_ + " on one host: ";
  if (!has_met_) {
    return text + std::to_string(heard_) + " of " + std::to_string(size()) +
           " ranks have told where their arrays are";
  }
  uint64_t taken = 0;
  uint64_t all = 0;
  for (int source = 0; source < size(); ++source) {
    taken += taken_[static_cast<size_t>(source)];
    all += blocks(place(source).bytes);
  }
  return text + std::to_string(taken) + " of " + std::to_string(all) + " blocks are here";
}

}  // namespace ringdl

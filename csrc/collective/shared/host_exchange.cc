#include "collective/shared/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "reduce/streaming.h"

namespace ringdl {
namespace {

// Bytes of a place in a stage: enough that a block is worth a wait for the others, and few enough
// that a stage in the caches is read before it leaves them.
constexpr size_t kPlaceBytes = 256 << 10;
constexpr size_t kSmallestBlock = 16 << 10;
constexpr uint64_t kPlaces = 2;

// The most in one step(): a fraction of a millisecond, in which the driver's lock is held.
constexpr size_t kBytesPerStep = 1 << 20;

constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

size_t block_bytes_of(bool is_same, size_t size) {
  if (is_same || size < 3) return kPlaceBytes;
  return std::max(kSmallestBlock, kPlaceBytes / (size - 1) / 64 * 64);
}

}  // namespace

HostExchange::HostExchange(Executor& executor, std::string name, std::shared_ptr<Window> window,
                           std::vector<int> ranks, int rank, Exchange exchange)
    : executor_(executor),
      name_(std::move(name)),
      window_(std::move(window)),
      ranks_(std::move(ranks)),
      rank_(rank),
      exchange_(std::move(exchange)),
      block_bytes_(block_bytes_of(exchange_.is_same, ranks_.size())),
      copies_in_(executor) {
  if (exchange_.is_same && size() > 1) {
    own_.bytes = static_cast<int64_t>(part(rank_ == 0 ? 1 : 0).bytes);
  }
  const auto offset = window_->offset_of(exchange_.data, exchange_.bytes);
  if (offset) {
    own_.begin = static_cast<int64_t>(*offset);
  } else {
    find_stage();
  }
  if (!exchange_.is_same && !exchange_.reduce_many) publish_parts();
  if (rank_ != 0) return;
  const size_t bytes = SharedCounters::bytes(size());
  counters_ = window_->allocate_stage(bytes);
  std::memset(counters_.get(), 0, bytes);
  own_.counters = static_cast<int64_t>(*window_->offset_of(counters_.get(), bytes));
}

// Other ranks read the counters and the parts once all have announced their arrays, which this rank
// knows, too, or will know.
HostExchange::~HostExchange() {
  if (has_met_) leave();
}

void HostExchange::leave() {
  stage_.reset();
  const auto ranks = static_cast<uint64_t>(size());
  if (parts_) {
    const Parts parts(parts_.get());
    window_->free_once(std::move(parts_), parts.read(), ranks);
  }
  if (!counters_) return;
  const SharedCounters counters(counters_.get(), size());
  window_->free_once(std::move(counters_), counters.left(), ranks);
}

uint64_t HostExchange::blocks(size_t bytes) const {
  return (bytes + block_bytes_ - 1) / block_bytes_;
}

size_t HostExchange::block_length(size_t bytes, uint64_t block) const {
  return std::min(block_bytes_, bytes - block * block_bytes_);
}

std::byte* HostExchange::at(int rank, int64_t offset) const {
  return window_->at(ranks_[static_cast<size_t>(rank)], static_cast<uint64_t>(offset));
}

// A place has room for a block of each other rank's part; for one block if all take the same.
void HostExchange::find_stage() {
  size_t longest = 0;
  for (int to = 0; to < size(); ++to) {
    if (to != rank_) longest = std::max(longest, part(to).bytes);
  }
  stage_blocks_ = blocks(longest);
  if (stage_blocks_ == 0) return;
  const size_t length = (block_length(longest, 0) + 63) / 64 * 64;
  lane_bytes_ = exchange_.is_same ? 0 : length;
  stride_ = exchange_.is_same ? length : length * static_cast<size_t>(size() - 1);
  stage_ = window_->allocate_stage(stride_ * std::min(stage_blocks_, kPlaces));
  own_.begin = static_cast<int64_t>(*window_->offset_of(stage_.get(), 1));
  own_.stride = static_cast<int64_t>(stride_);
  own_.lane_bytes = static_cast<int64_t>(lane_bytes_);
}

void HostExchange::publish_parts() {
  const size_t bytes = Parts::bytes(size());
  parts_ = window_->allocate_stage(bytes);
  std::memset(parts_.get(), 0, bytes);
  std::copy(exchange_.parts.begin(), exchange_.parts.end(), Parts(parts_.get()).begin());
  own_.parts = static_cast<int64_t>(*window_->offset_of(parts_.get(), bytes));
}

// Each rank takes what the others have for it block by block, and counts what it has taken in
// copied(rank), where a source without further blocks holds up nobody. Block b is put into a stage,
// and counted in ready(rank), once all have counted those before b-1, whose place it takes. So of
// the ranks that have counted least, one can always go on: it waits for block m of some rank, which
// can be put there, as all have counted m blocks.
bool HostExchange::step(Channel& channel) {
  if (!announcements_ && !announce()) return false;
  const bool has_reported_all = announcements_->step(channel);
  if (!has_met_) {
    if (!announcements_->is_complete()) return false;
    begin();
  }
  const int64_t before = moved_;
  while (static_cast<size_t>(moved_ - before) * block_bytes_ < kBytesPerStep) {
    const bool has_moved = copy_in();
    if (!take() && !has_moved) break;
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (taken_[static_cast<size_t>(rank)] < blocks(source(rank).bytes)) return false;
  }
  if (!has_notified_taken_ || !all_have_taken_their_parts() || !has_reported_all) return false;
  shared_.left().fetch_add(1, std::memory_order_release);
  leave();
  return true;
}

// Fills the stage before it announces where the stage is.
bool HostExchange::announce() {
  while (copy_in()) {
  }
  if (in_ < std::min(stage_blocks_, kPlaces)) return false;
  own_.blocks_in = static_cast<int64_t>(in_);
  announcements_.emplace(cpu_executor(), std::vector<size_t>(ranks_.size(), sizeof(Announcement)),
                         rank_, &own_);
  return true;
}

HostExchange::Announcement HostExchange::announced_by(int rank) const {
  Announcement told;
  std::memcpy(&told, announcements_->block(rank), sizeof(told));
  return told;
}

HostExchange::Source HostExchange::find_source(int rank, const Announcement& told) const {
  if (rank == rank_) return {exchange_.data + part(rank_).begin, 0, part(rank_).bytes};
  Span here{0, static_cast<size_t>(told.bytes)};
  if (exchange_.reduce_many) here = part(rank_);
  if (told.parts >= 0) {
    const Parts parts(at(rank, told.parts));
    here = parts.begin()[rank_];
    parts.read().fetch_add(1, std::memory_order_release);
  }
  const size_t before =
      told.stride == 0 ? here.begin : lane(rank, rank_) * static_cast<size_t>(told.lane_bytes);
  return {at(rank, told.begin) + before, static_cast<size_t>(told.stride), here.bytes};
}

void HostExchange::begin() {
  has_met_ = true;
  shared_ = SharedCounters(at(0, announced_by(0).counters), size());
  if (parts_) Parts(parts_.get()).read().fetch_add(1, std::memory_order_release);
  taken_.assign(ranks_.size(), 0);
  size_t total = 0;
  begins_ = exchange_.begins;
  for (int rank = 0; rank < size(); ++rank) {
    const Announcement told = announced_by(rank);
    const Source& from = sources_.emplace_back(find_source(rank, told));
    if (exchange_.begins.empty()) begins_.push_back(exchange_.reduce_many ? 0 : total);
    there_.push_back(from.stride == 0 ? kAll : static_cast<uint64_t>(told.blocks_in));
    result_.lengths.push_back(static_cast<int64_t>(from.bytes));
    total += from.bytes;
  }
  if (exchange_.output == nullptr) result_.data = Buffer(total);
  output_ = exchange_.output == nullptr ? result_.data.data() : exchange_.output;
  streams_ = (exchange_.reduce_many ? source(0).bytes : total) >= kStreamBytes;
  notify_taken();
}

bool HostExchange::copy_in() {
  const auto next = static_cast<uint64_t>(copies_in_.asked());
  const bool has_place = next < kPlaces || (has_met_ && all_have_taken(next - kPlaces + 1));
  const bool asks = next < stage_blocks_ && has_place;
  if (asks) copies_in_.add(copy_block_in(next));
  const uint64_t before = std::exchange(in_, static_cast<uint64_t>(copies_in_.done()));
  if (in_ == before) return asks;
  moved_ += static_cast<int64_t>(in_ - before);
  if (has_met_) shared_.ready(rank_).store(in_, std::memory_order_release);
  return true;
}

// Past the caches: between cores without a shared cache, lines that another core has just written
// arrive slowly, and a broadcast of 64 MiB took 32 ms, not 8. Small parts that are reduced are
// better kept in the caches.
Executor::Ticket HostExchange::copy_block_in(uint64_t block) {
  std::byte* const into = stage_.get() + block % kPlaces * stride_;
  const size_t begin = block * block_bytes_;
  Executor::Ticket last = Executor::kDone;
  for (int to = 0; to < size(); ++to) {
    const Span& its = part(to);
    if (to == rank_ || begin >= its.bytes) continue;
    const std::byte* const from = exchange_.data + its.begin + begin;
    const size_t length = std::min(block_bytes_, its.bytes - begin);
    last = std::max(last, executor_.copy(into + lane(rank_, to) * lane_bytes_, from, length,
                                         !exchange_.reduce_many || its.bytes >= kStreamBytes));
    if (exchange_.is_same) break;
  }
  return last;
}

// Takes one block of each rank, or, if reduced, of all at once; the next once that is done.
bool HostExchange::take() {
  if (!has_notified_taken_) {
    if (!executor_.is_done(taking_)) return false;
    notify_taken();
    return true;
  }
  bool has_moved = false;
  if (exchange_.reduce_many) {
    has_moved = reduce_next();
  } else {
    for (int i = 0; i < size(); ++i) has_moved |= take_from((rank_ + i) % size());
  }
  if (!has_moved) return false;
  has_notified_taken_ = false;
  if (executor_.is_done(taking_)) notify_taken();
  return true;
}

bool HostExchange::take_from(int rank) {
  uint64_t& taken = taken_[static_cast<size_t>(rank)];
  const size_t bytes = source(rank).bytes;
  if (taken == blocks(bytes) || !is_there(rank, taken)) return false;
  taking_ = std::max(
      taking_, executor_.copy(output_ + begins_[static_cast<size_t>(rank)] + taken * block_bytes_,
                              block_at(rank, taken), block_length(bytes, taken), streams_));
  ++taken;
  ++moved_;
  return true;
}

bool HostExchange::reduce_next() {
  const uint64_t block = taken_[0];
  const size_t bytes = source(0).bytes;
  if (block == blocks(bytes)) return false;
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size(); ++rank) {
    if (!is_there(rank, block)) return false;
    sources.push_back(block_at(rank, block));
  }
  std::byte* const target = output_ + block * block_bytes_;
  taking_ = executor_.reduce(*exchange_.reduce_many, sources, {&target, 1},
                             block_length(bytes, block), streams_);
  for (uint64_t& taken : taken_) ++taken;
  ++moved_;
  return true;
}

bool HostExchange::is_there(int rank, uint64_t block) {
  uint64_t& there = there_[static_cast<size_t>(rank)];
  if (there <= block) {
    there = std::max(there, shared_.ready(rank).load(std::memory_order_acquire));
  }
  return there > block;
}

const std::byte* HostExchange::block_at(int rank, uint64_t block) const {
  const Source& from = source(rank);
  return from.first + (from.stride == 0 ? block * block_bytes_ : block % kPlaces * from.stride);
}

void HostExchange::notify_taken() {
  has_notified_taken_ = true;
  uint64_t least = kAll;
  for (int rank = 0; rank < size(); ++rank) {
    const uint64_t taken = taken_[static_cast<size_t>(rank)];
    if (rank != rank_ && taken < blocks(source(rank).bytes)) least = std::min(least, taken);
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
    const uint64_t its = blocks(part(rank).bytes);
    if (rank != rank_ && shared_.copied(rank).load(std::memory_order_acquire) < its) return false;
  }
  return true;
}

std::string HostExchange::describe() const {
  const std::string text = name_ + " on one host: ";
  if (!has_met_) {
    return text + std::to_string(announcements_ ? announcements_->blocks_here() : 0) + " of " +
           std::to_string(size()) + " ranks have announced their arrays";
  }
  uint64_t taken = 0;
  uint64_t all = 0;
  for (int rank = 0; rank < size(); ++rank) {
    taken += taken_[static_cast<size_t>(rank)];
    all += blocks(source(rank).bytes);
  }
  return text + std::to_string(taken) + " of " + std::to_string(all) + " blocks taken";
}

}  // namespace ringdl

#include "collective/shared/staged_allreduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace ringdl {
namespace {

constexpr size_t kLineBytes = 64;

// From here on arrays and stages are written past the caches if the trial says so.
constexpr size_t kStreamedBytes = 1 << 20;

// So many at most in one step(): about half a millisecond, in which the driver's lock is held.
constexpr int kStepsAtOnce = 6;

// From two of the least blocks on an array has two at least: one goes in while the other is
// reduced. Larger ones mean fewer waits for one another, and longer chunks. A smaller array is one
// block, which all ranks share evenly.
size_t chunk_bytes_of(Executor::Grain grain, size_t bytes, int size) {
  const auto ranks = static_cast<size_t>(size);
  const size_t block = std::clamp(std::bit_floor(bytes / 2), grain.least_block, grain.most_block);
  if (bytes <= block) {
    const size_t lines = (bytes + ranks * kLineBytes - 1) / (ranks * kLineBytes);
    return std::max<size_t>(lines, 1) * kLineBytes;
  }
  return std::max(grain.least_piece, block / ranks / kLineBytes * kLineBytes);
}

}  // namespace

size_t StagedAllreduce::stage_bytes(Executor::Grain grain, size_t bytes, int size) {
  return 2 * chunk_bytes_of(grain, bytes, size) * static_cast<size_t>(size);
}

StagedAllreduce::StagedAllreduce(Executor& executor, std::vector<std::byte*> stages,
                                 SharedCounters counters, std::byte* data, size_t bytes,
                                 ReduceMany reduce_many, int rank, StoreTrial& trial)
    : executor_(executor),
      stages_(std::move(stages)),
      counters_(counters),
      data_(data),
      bytes_(bytes),
      reduce_many_(reduce_many),
      rank_(rank),
      chunk_bytes_(chunk_bytes_of(executor.grain(), bytes, size())),
      block_bytes_(chunk_bytes_ * static_cast<size_t>(size())),
      blocks_((bytes + block_bytes_ - 1) / block_bytes_),
      streams_(executor.is_immediate() && bytes >= kStreamedBytes),
      trial_(trial),
      first_block_(streams_ ? trial.begin(blocks_) : 0) {}

// Each rank does the same steps in the same order, and counts them where all see it:
//   0: block 0 in;  3b+1: block b+1 in;  3b+2: block b is reduced;  3b+3: block b out.
// In go the chunks that others reduce; the own one is reduced where it is. Its sums are put where
// the others' numbers were, in their stages: the lines are in this core's caches then, so they move
// between cores three times per block and not four, and 128 to 512 KiB take two ranks 0.6 of the
// time. No byte is copied that only its owner reads. A stage holds two blocks. A block is reduced
// once all ranks have theirs in, and goes out once all have reduced their chunks: out of the own
// stage, so its place is free then.
bool StagedAllreduce::step_in_memory() {
  const uint64_t end = 3 * blocks_ + 1;
  for (int i = 0; i < kStepsAtOnce && next_ < end; ++i) {
    if (!has_asked_ && !do_next()) return false;
    has_asked_ = true;
    if (!executor_.is_done(asked_)) return false;
    has_asked_ = false;
    ++next_;
    counters_.ready(rank_).store(next_, std::memory_order_release);
  }
  return next_ == end && all_have_done(end);
}

bool StagedAllreduce::do_next() {
  if (next_ == 0) {
    if (blocks_ > 0) timed(0, &StagedAllreduce::copy_in);
    return true;
  }
  const uint64_t block = (next_ - 1) / 3;
  switch ((next_ - 1) % 3) {
    case 0:
      if (block + 1 >= blocks_) return true;
      timed(block + 1, &StagedAllreduce::copy_in);
      return true;
    case 1:
      if (!all_have_done(block == 0 ? 1 : 3 * block - 1)) return false;
      timed(block, &StagedAllreduce::reduce);
      return true;
    default:
      if (!all_have_done(3 * block + 3)) return false;
      timed(block, &StagedAllreduce::copy_out);
      if (streams_) trial_.end(first_block_ + block, (block + 1) * block_bytes_ <= bytes_);
      return true;
  }
}

void StagedAllreduce::timed(uint64_t block,
                            Executor::Ticket (StagedAllreduce::*part)(uint64_t) const) {
  const auto ask = [&] { asked_ = (this->*part)(block); };
  if (!streams_) return ask();
  trial_.time(first_block_ + block, ask);
}

bool StagedAllreduce::all_have_done(uint64_t steps) {
  if (all_have_done_ >= steps) return true;
  all_have_done_ = std::min(next_, counters_.least_of_others(rank_, &SharedCounters::ready));
  return all_have_done_ >= steps;
}

std::byte* StagedAllreduce::stage(int rank, uint64_t block) const {
  return stages_[static_cast<size_t>(rank)] + block % 2 * block_bytes_;
}

Span StagedAllreduce::chunk(int rank, uint64_t block) const {
  const size_t length = std::min(block_bytes_, bytes_ - static_cast<size_t>(block) * block_bytes_);
  const size_t begin = std::min(length, static_cast<size_t>(rank) * chunk_bytes_);
  return {begin, std::min(chunk_bytes_, length - begin)};
}

Executor::Ticket StagedAllreduce::copy_in(uint64_t block) const {
  Executor::Ticket last = Executor::kDone;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    const Span part = chunk(rank, block);
    last =
        std::max(last, executor_.copy(stage(rank_, block) + part.begin, array(block) + part.begin,
                                      part.bytes, streams_block(block)));
  }
  return last;
}

Executor::Ticket StagedAllreduce::reduce(uint64_t block) const {
  const Span part = chunk(rank_, block);
  std::byte* const own = array(block) + part.begin;
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size(); ++rank) {
    sources.push_back(rank == rank_ ? own : stage(rank, block) + part.begin);
  }
  std::vector<std::byte*> targets;
  for (int rank = 0; rank < size(); ++rank) {
    targets.push_back(rank == rank_ ? own : stage(rank, block) + part.begin);
  }
  return executor_.reduce(reduce_many_, sources, targets, part.bytes, streams_block(block));
}

Executor::Ticket StagedAllreduce::copy_out(uint64_t block) const {
  Executor::Ticket last = Executor::kDone;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    const Span part = chunk(rank, block);
    last =
        std::max(last, executor_.copy(array(block) + part.begin, stage(rank_, block) + part.begin,
                                      part.bytes, streams_block(block)));
  }
  return last;
}

std::string StagedAllreduce::describe() const {
  return "staged allreduce: " + std::to_string(next_) + " of " + std::to_string(3 * blocks_ + 1) +
         " steps done, all ranks have done " + std::to_string(all_have_done_);
}

}  // namespace ringdl

#include "collective/shared/direct_allreduce.h"

#include <algorithm>
#include <utility>

#include "reduce/streaming.h"

namespace ringdl {
namespace {

constexpr size_t kPiecesPerRank = 4;

size_t piece_bytes_of(Executor::Grain grain, size_t bytes, size_t size) {
  const size_t even = bytes / (kPiecesPerRank * size) / 4096 * 4096;
  return std::clamp(even, grain.least_piece, grain.most_piece);
}

}  // namespace

DirectAllreduce::DirectAllreduce(Executor& executor, SharedArrays shared, uint64_t instance,
                                 size_t bytes, ReduceMany reduce_many, int rank)
    : executor_(executor),
      shared_(std::move(shared)),
      instance_(instance),
      bytes_(bytes),
      reduce_many_(reduce_many),
      rank_(rank),
      piece_bytes_(piece_bytes_of(executor.grain(), bytes, shared_.arrays.size())),
      pieces_((bytes + piece_bytes_ - 1) / piece_bytes_),
      reductions_(executor) {}

DirectAllreduce::~DirectAllreduce() { reductions_.await(); }

// A rank has arrived in this instance if its counter says instance + 1. Pieces are only touched
// once all have: until then an array is its owner's. Whoever has reduced a piece adds one to
// `done`, and the arrays are their owners' again when it says (instance + 1) * pieces. A rank can
// come to the next instance only after that, so counters of two instances never mix.
bool DirectAllreduce::step_in_memory() {
  if (!has_arrived_) {
    has_arrived_ = true;
    shared_.counters.ready(rank_).store(instance_ + 1, std::memory_order_release);
  }
  if (!all_ready()) return false;
  uint64_t piece = 0;
  notify_reduced();
  const int most = executor_.grain().most_pieces;
  for (int i = 0; i < most; ++i) {
    const int64_t under_way = reductions_.asked() - reduced_;
    if (under_way == most) break;
    if (!claim(rank_, piece) && (under_way > 0 || !claim_others(piece))) break;
    reductions_.add(reduce(piece));
    notify_reduced();
  }
  return shared_.counters.done().load(std::memory_order_acquire) >= (instance_ + 1) * pieces_;
}

bool DirectAllreduce::all_ready() {
  while (ready_ < size() &&
         shared_.counters.ready(ready_).load(std::memory_order_acquire) > instance_) {
    ++ready_;
  }
  return ready_ == size();
}

bool DirectAllreduce::claim_others(uint64_t& piece) {
  for (int i = 1; i < size(); ++i) {
    if (claim((rank_ + i) % size(), piece)) return true;
  }
  return false;
}

bool DirectAllreduce::claim(int rank, uint64_t& piece) {
  const uint64_t first = first_piece(rank);
  const uint64_t count = first_piece(rank + 1) - first;
  SharedCounters::Counter& counter = shared_.counters.claimed(rank);
  uint64_t claimed = counter.load(std::memory_order_relaxed);
  do {
    if (claimed >= (instance_ + 1) * count) return false;
  } while (!counter.compare_exchange_weak(claimed, claimed + 1, std::memory_order_relaxed));
  piece = first + (claimed - instance_ * count);
  return true;
}

Executor::Ticket DirectAllreduce::reduce(uint64_t piece) {
  const size_t begin = static_cast<size_t>(piece) * piece_bytes_;
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> targets;
  for (std::byte* const array : shared_.arrays) {
    sources.push_back(array + begin);
    targets.push_back(array + begin);
  }
  return executor_.reduce(reduce_many_, sources, targets, std::min(piece_bytes_, bytes_ - begin),
                          bytes_ >= kStreamBytes);
}

void DirectAllreduce::notify_reduced() {
  const int64_t before = std::exchange(reduced_, reductions_.done());
  if (reduced_ == before) return;
  shared_.counters.done().fetch_add(static_cast<uint64_t>(reduced_ - before),
                                    std::memory_order_acq_rel);
}

std::string DirectAllreduce::describe() const {
  int here = 0;
  for (int rank = 0; rank < size(); ++rank) {
    here += static_cast<int>(shared_.counters.ready(rank).load() > instance_);
  }
  if (here < size()) {
    return "direct allreduce: " + std::to_string(here) + " of " + std::to_string(size()) +
           " ranks have arrived";
  }
  return "direct allreduce: " +
         std::to_string(shared_.counters.done().load() - instance_ * pieces_) + " of " +
         std::to_string(pieces_) + " pieces reduced, " + std::to_string(reduced_) + " by this rank";
}

}  // namespace ringdl

#include "engine/make_collective.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/messages/alltoall.h"
#include "collective/messages/barrier.h"
#include "collective/messages/broadcast.h"
#include "collective/messages/gather.h"
#include "collective/messages/in_order.h"
#include "collective/messages/ring_reduce_scatter.h"
#include "collective/messages/scatter.h"
#include "collective/messages/tree_broadcast.h"
#include "collective/planner/algorithms.h"
#include "collective/row_partition.h"
#include "collective/shared/host_exchange.h"
#include "collective/two_level/allgather.h"
#include "collective/two_level/two_levels.h"

namespace ringdl {
namespace {

bool has_root(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter;
}

Reducer reducer_of(const Call& call, int size) {
  if (call.operation.kernel != nullptr) return {call.dtype, call.operation.kernel};
  return {call.dtype, call.reduction, size};
}

Codec codec_of(const Call& call) { return call.compression ? Codec(*call.compression) : Codec(); }

// Over the ranks of a host.
ReduceMany reduce_many_of(const Call& call, const HostLayout& layout) {
  if (call.operation.kernel != nullptr) return {call.dtype, call.operation.kernel};
  return over_host(call.dtype, call.reduction, layout);
}

void refuse_compression(const Call& call) {
  const bool is_sum = call.reduction == Reduction::kSum || call.reduction == Reduction::kAverage;
  const bool is_narrow =
      *call.compression == DType::kFloat16 || *call.compression == DType::kBFloat16;
  if (call.kind == Kind::kAllreduce && call.dtype == DType::kFloat32 && is_narrow && is_sum &&
      call.operation.kernel == nullptr) {
    return;
  }
  throw UsageError(
      "compression is for sums and averages of float32, which then travels as float16 or bfloat16; "
      "leave it out");
}

void refuse_bits_of_floats(const Call& call) {
  if (call.operation.kernel != nullptr || has_reduction(call.dtype, call.reduction)) return;
  throw UsageError("a " + std::string(name_of(call.reduction)) +
                   " is for integers and bool, not for " + std::string(name_of(call.dtype)) +
                   "; view the array as integers, or take another reduction");
}

// The bytes for each rank; `splits` are its rows.
std::vector<int64_t> split_bytes(const Call& call, int size) {
  const std::string kind(name_of(call.kind));
  if (call.splits.size() != static_cast<size_t>(size)) {
    throw UsageError(kind + ": splits names " + std::to_string(call.splits.size()) +
                     " ranks, but there are " + std::to_string(size));
  }
  std::vector<int64_t> bytes;
  int64_t sum = 0;
  for (const int64_t rows : call.splits) {
    if (rows < 0) throw UsageError(kind + ": splits holds the negative " + std::to_string(rows));
    sum += rows;
    bytes.push_back(rows * static_cast<int64_t>(row_bytes(call)));
  }
  if (sum != rows_of(call)) {
    throw UsageError(kind + ": splits adds up to " + std::to_string(sum) +
                     " rows, but the array has " + std::to_string(rows_of(call)));
  }
  return bytes;
}

// Whether ranks that all share memory move it there, as far as they can know alike beforehand.
bool is_exchanged_in_memory(Kind kind, size_t bytes, int size) {
  constexpr int kFewRanks = 4;  // of more, a ring is too long even for what goes with headers
  switch (kind) {
    case Kind::kAllgather:
    case Kind::kAlltoall:
      return true;
    case Kind::kReduceScatter:
      return bytes >= HostExchange::kLeastBytes || size > kFewRanks;
    case Kind::kBroadcast:
    case Kind::kMessage:
      return bytes >= HostExchange::kLeastBytes;
    default:
      return false;
  }
}

std::vector<Span> spans_of(const std::vector<int64_t>& lengths) {
  std::vector<Span> spans;
  size_t begin = 0;
  for (const int64_t length : lengths) {
    spans.push_back({begin, static_cast<size_t>(length)});
    begin += static_cast<size_t>(length);
  }
  return spans;
}

// Ranks host by host, beginning with one of them: in a ring or a chain in this order, what all
// ranks get or give crosses each host's link once.
std::vector<int> host_by_host(const HostLayout& layout, int first) {
  std::vector<int> order = {first};
  size_t first_host = 0;
  while (!std::ranges::count(layout.hosts[first_host], first)) ++first_host;
  for (size_t i = 0; i < layout.hosts.size(); ++i) {
    for (const int rank : layout.hosts[(first_host + i) % layout.hosts.size()]) {
      if (rank != first) order.push_back(rank);
    }
  }
  return order;
}

// Whether each rank comes after the one before it anyway.
bool is_ring_of_ranks(const std::vector<int>& order) {
  const int size = static_cast<int>(order.size());
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i] != (order[i - 1] + 1) % size) return false;
  }
  return true;
}

std::unique_ptr<Collective> make_broadcast(std::byte* array, size_t bytes, int root, int rank,
                                           size_t segment_bytes, const HostLayout& layout) {
  std::vector<int> order = host_by_host(layout, root);
  const int size = static_cast<int>(order.size());
  const auto make = [&](int from, int place) -> std::unique_ptr<Collective> {
    if (TreeBroadcast::is_faster(bytes, size, segment_bytes)) {
      return std::make_unique<TreeBroadcast>(array, bytes, from, place, size, segment_bytes);
    }
    return std::make_unique<Broadcast>(array, bytes, from, place, size, segment_bytes);
  };
  if (is_ring_of_ranks(order) || bytes < HostExchange::kLeastBytes) return make(root, rank);
  const auto place = static_cast<int>(std::ranges::find(order, rank) - order.begin());
  auto inner = make(0, place);
  return std::make_unique<InOrder>(std::move(order), rank, std::move(inner));
}

// Up to how many bytes of all blocks rounds are faster than the ring, whose P-1 steps take as long
// as a link needs for so many bytes each. In rounds each of the ranks of a host receives all blocks
// over its link; around the ring they come once.
size_t few_bytes_of(const HostLayout& layout) {
  constexpr size_t kStepBytes = 4096;  // the default costs between hosts
  size_t sharing = 1;
  for (const auto& ranks : layout.hosts) sharing = std::max(sharing, ranks.size());
  const auto size = static_cast<size_t>(layout.size());
  const auto rounds = static_cast<size_t>(std::bit_width(size - 1));
  return (size - 1 - rounds) * kStepBytes / std::max<size_t>(sharing - 1, 1);
}

// If all hosts have as many ranks.
std::optional<Levels> levels_of(const std::vector<int>& order, const Group& group,
                                const std::shared_ptr<Window>& window, const HostLayout& layout) {
  const size_t per_host = layout.hosts[0].size();
  const bool are_even = std::ranges::all_of(
      layout.hosts, [per_host](const auto& ranks) { return ranks.size() == per_host; });
  if (!window || !are_even || layout.hosts.size() == 1) return std::nullopt;
  Levels levels{window, {}, static_cast<int>(per_host)};
  for (const int rank : order) levels.ranks.push_back(group.ranks[static_cast<size_t>(rank)]);
  return levels;
}

std::unique_ptr<Collective> make_ring(Executor& executor, const Call& call, std::byte* array,
                                      const Group& group, size_t segment_bytes,
                                      const std::shared_ptr<Window>& window,
                                      const HostLayout& layout) {
  std::vector<int> order = host_by_host(layout, 0);
  const std::optional<Levels> levels = levels_of(order, group, window, layout);
  const bool is_in_order = is_ring_of_ranks(order);
  const auto place = static_cast<int>(std::ranges::find(order, group.rank) - order.begin());
  std::unique_ptr<Collective> ring;
  if (call.kind == Kind::kAllgather) {
    ring = std::make_unique<Allgather>(executor, array, bytes_of(call), order, place, segment_bytes,
                                       few_bytes_of(layout), levels);
  } else {
    const auto parts = row_partition(rows_of(call), row_bytes(call), group.size());
    std::vector<Span> chunks;
    for (const int rank : order) chunks.push_back(parts[static_cast<size_t>(rank)]);
    auto* const output = static_cast<std::byte*>(call.output);
    const Reducer reducer = reducer_of(call, group.size());
    if (levels && bytes_of(call) >= Levels::kLeastBytes) {
      ring = std::make_unique<TwoLevelReduceScatter>(
          executor, *levels, array, output, std::move(chunks), reduce_many_of(call, layout),
          reducer, place, segment_bytes);
    } else {
      ring = std::make_unique<RingReduceScatter>(executor, array, output, std::move(chunks),
                                                 reducer, place, segment_bytes);
    }
  }
  if (is_in_order) return ring;
  return std::make_unique<InOrder>(std::move(order), group.rank, std::move(ring));
}

std::unique_ptr<Collective> make_host_exchange(Executor& executor, const Call& call,
                                               std::byte* array, const Group& group,
                                               const std::shared_ptr<Window>& window,
                                               const HostLayout& layout) {
  const auto size = static_cast<size_t>(group.size());
  Exchange exchange;
  exchange.data = array;
  exchange.bytes = bytes_of(call);
  if (call.kind == Kind::kAllgather) {
    exchange.parts.assign(size, {0, exchange.bytes});
    exchange.is_same = true;
  } else if (call.kind == Kind::kAlltoall) {
    exchange.parts = spans_of(split_bytes(call, group.size()));
  } else if (call.kind == Kind::kReduceScatter) {
    exchange.parts = row_partition(rows_of(call), row_bytes(call), group.size());
    exchange.reduce_many = reduce_many_of(call, layout);
    exchange.output = static_cast<std::byte*>(call.output);
  } else {
    const int root = call.kind == Kind::kMessage ? 0 : call.root;
    exchange.parts.assign(size, {0, group.rank == root ? exchange.bytes : 0});
    exchange.parts[static_cast<size_t>(group.rank)] = {};
    exchange.is_same = true;
    exchange.output = array;
  }
  return std::make_unique<HostExchange>(executor, std::string(name_of(call.kind)), window,
                                        group.ranks, group.rank, std::move(exchange));
}

}  // namespace

ReduceMany over_host(DType dtype, Reduction reduction, const HostLayout& layout) {
  if (layout.hosts.size() > 1) return {dtype, undivided(dtype, reduction), 1};
  return {dtype, reduction, layout.local_size()};
}

void refuse_wrong(const Call& call) {
  refuse_bits_of_floats(call);
  if (call.compression) refuse_compression(call);
}

std::unique_ptr<Collective> make_collective(const Surroundings& its, const Call& call,
                                            const Description& description, void* data,
                                            const Group& group) {
  auto& [executor, segment_bytes, window, layout, slot_call] = its;
  const int rank = group.rank;
  const int size = group.size();
  auto* array = static_cast<std::byte*>(data);
  const size_t bytes = bytes_of(call);
  if (has_root(call.kind) && (call.root < 0 || call.root >= size)) {
    throw UsageError(std::string(name_of(call.kind)) + ": root " + std::to_string(call.root) +
                     " is not a rank; ranks are 0 to " + std::to_string(size - 1));
  }
  refuse_wrong(call);
  if (window && layout->hosts.size() == 1 && is_exchanged_in_memory(call.kind, bytes, size)) {
    return make_host_exchange(executor, call, array, group, window, *layout);
  }
  switch (call.kind) {
    case Kind::kAllreduce: {
      const AllreduceAlgorithm& algorithm = algorithm_of(description.algorithm);
      if (!algorithm.can_run(*layout)) {
        throw UsageError("the " + std::string(algorithm.name) + " allreduce is for " +
                         std::string(algorithm.ranks) + ", which these are not; take the ring");
      }
      return algorithm.make({executor, array, bytes, reducer_of(call, size),
                             reduce_many_of(call, *layout), codec_of(call), segment_bytes, rank,
                             size, group.ranks, window, layout, slot_call});
    }
    case Kind::kBroadcast:
    case Kind::kMessage:
      return make_broadcast(array, bytes, call.kind == Kind::kMessage ? 0 : call.root, rank,
                            segment_bytes, *layout);
    case Kind::kAllgather:
    case Kind::kReduceScatter:
      return make_ring(executor, call, array, group, segment_bytes, window, *layout);
    case Kind::kAlltoall:
      return std::make_unique<Alltoall>(executor, array, split_bytes(call, size), rank, size,
                                        segment_bytes);
    case Kind::kGather:
      return std::make_unique<Gather>(executor, array, bytes, call.root, rank, size, segment_bytes);
    case Kind::kScatter:
      return std::make_unique<Scatter>(
          executor, array, rank == call.root ? split_bytes(call, size) : std::vector<int64_t>{},
          call.root, rank, size, segment_bytes);
    case Kind::kBarrier:
      return std::make_unique<Barrier>();
  }
  throw Error("there is no such kind of work");
}

}  // namespace ringdl

// Collectives on ranks that are objects of one thread, whose messages move in orders drawn from a
// seed: results, traffic, and that nobody finishes where two ranks disagree.

#include <bit>
#include <numeric>

#include "collective/messages/alltoall.h"
#include "collective/messages/broadcast.h"
#include "collective/messages/bruck.h"
#include "collective/messages/gather.h"
#include "collective/messages/grid_allreduce.h"
#include "collective/messages/in_order.h"
#include "collective/messages/recursive_doubling.h"
#include "collective/messages/ring_reduce_scatter.h"
#include "collective/messages/scatter.h"
#include "collective/messages/tree_broadcast.h"
#include "collective/row_partition.h"
#include "collective/two_level/allgather.h"
#include "network.h"

using namespace ringdl;
using ringdl::check::Network;
using Bytes = std::vector<std::byte>;
using Parts = std::vector<std::unique_ptr<Collective>>;

namespace {

constexpr int kLargestSize = 8;
constexpr int64_t kReceives = 4;  // that may be in flight on one edge
constexpr int64_t kSends = 8;

template <class T>
Bytes bytes_of(const std::vector<T>& items) {
  Bytes bytes(items.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), items.data(), bytes.size());
  return bytes;
}

// Floats whose sum shows in which order it was taken.
std::vector<float> floats(int rank, size_t count) {
  std::vector<float> items(count);
  for (size_t i = 0; i < count; ++i) {
    items[i] = 1.0f / static_cast<float>(1 + (i * 7 + static_cast<size_t>(rank) * 13) % 101);
  }
  return items;
}

Bytes noise(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

bool equal(const std::byte* data, const Bytes& expected) {
  return std::equal(expected.begin(), expected.end(), data);
}

int64_t segments(int64_t bytes, size_t segment_bytes) {
  const auto segment = static_cast<int64_t>(segment_bytes);
  return (bytes + segment - 1) / segment;
}

void partitions_rows() {
  for (int size = 1; size <= 9; ++size) {
    for (const int64_t rows : {0, 1, 5, 8, 100}) {
      const std::vector<Span> parts = row_partition(rows, 12, size);
      CHECK_EQ(parts.size(), static_cast<size_t>(size));
      size_t begin = 0;
      for (int rank = 0; rank < size; ++rank) {
        const int64_t own = rows / size + (rank < rows % size ? 1 : 0);
        CHECK_EQ(parts[rank].bytes, static_cast<size_t>(own) * 12);
        CHECK_EQ(parts[rank].begin, begin);
        begin += parts[rank].bytes;
      }
      CHECK_EQ(begin, static_cast<size_t>(rows) * 12);
    }
  }
  CHECK_EQ(row_partition(int64_t{3} << 30, 8, 3)[2].begin, size_t{1} << 34);
}

// Chunk c is summed in the order c+1, c+2, ..., c, and divided last.
std::vector<float> expected_chunk(const std::vector<std::vector<float>>& data, size_t place,
                                  Span chunk, bool average) {
  std::vector<float> sums;
  const size_t size = data.size();
  for (size_t i = chunk.begin / 4; i < (chunk.begin + chunk.bytes) / 4; ++i) {
    float sum = data[(place + 1) % size][i];
    for (size_t k = 2; k <= size; ++k) sum += data[(place + k) % size][i];
    sums.push_back(average ? sum / static_cast<float>(size) : sum);
  }
  return sums;
}

void reduce_scatter(int size, const std::vector<Span>& chunks, size_t segment_bytes,
                    uint64_t seed) {
  const Reduction reduction = seed % 2 == 0 ? Reduction::kSum : Reduction::kAverage;
  size_t total = 0;
  size_t longest = 0;
  for (const Span& chunk : chunks) {
    total += chunk.bytes;
    longest = std::max(longest, chunk.bytes);
  }
  std::vector<std::vector<float>> data;
  std::vector<Bytes> outputs;
  Network network(size, seed);
  Parts parts;
  for (int rank = 0; rank < size; ++rank) {
    data.push_back(floats(rank, total / 4));
    outputs.emplace_back(chunks[rank].bytes, std::byte{7});
    parts.push_back(std::make_unique<RingReduceScatter>(
        network.executor(rank), reinterpret_cast<const std::byte*>(data.back().data()),
        outputs.back().data(), chunks, Reducer(DType::kFloat32, reduction, size), rank,
        segment_bytes));
  }
  CHECK(network.run(parts));
  CHECK(network.most_receives <= kReceives && network.most_sends <= kSends);
  const int64_t least =
      std::max<int64_t>(segments(static_cast<int64_t>(longest), segment_bytes), 1);
  for (int rank = 0; rank < size; ++rank) {
    const Bytes expected = bytes_of(expected_chunk(data, static_cast<size_t>(rank), chunks[rank],
                                                   reduction == Reduction::kAverage));
    CHECK(outputs[rank] == expected);
    CHECK(data[rank] == floats(rank, total / 4));
    const Network::Traffic& sent = network.traffic[rank];
    CHECK_EQ(sent.bytes, size == 1 ? 0 : static_cast<int64_t>(total - outputs[rank].size()));
    CHECK_EQ(sent.messages, network.traffic[0].messages);
    CHECK(sent.messages >= (size - 1) * least && sent.messages <= (size - 1) * (least + least / 8));
  }
}

void reduce_scatters(int size, uint64_t seed) {
  for (const size_t segment_bytes : {64u, 100u, 1024u, 1u << 20}) {
    for (const int64_t rows : {0, 1, 7, 64, 1001}) {
      std::vector<Span> chunks = row_partition(rows, 12, size);
      reduce_scatter(size, chunks, segment_bytes, seed);
      std::shuffle(chunks.begin(), chunks.end(), std::mt19937_64(seed));
      reduce_scatter(size, chunks, segment_bytes, seed);
    }
    std::vector<Span> uneven;  // every third chunk is empty, the others grow
    size_t begin = 0;
    for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
      uneven.push_back({begin, rank % 3 == 1 ? 0 : 4 * (rank * 97 + 501)});
      begin += uneven.back().bytes;
    }
    reduce_scatter(size, uneven, segment_bytes, seed);
  }
}

// A chunk is summed around its row, then around its column, and divided last.
void grid_allreduce(int size, int columns, size_t count, size_t segment_bytes, uint64_t seed) {
  const Reduction reduction = seed % 2 == 0 ? Reduction::kSum : Reduction::kAverage;
  std::vector<std::vector<float>> data;
  Network network(size, seed);
  Parts parts;
  for (int rank = 0; rank < size; ++rank) data.push_back(floats(rank, count));
  std::vector<double> sums(count, 0.0);
  for (const auto& its : data) {
    for (size_t i = 0; i < count; ++i) sums[i] += static_cast<double>(its[i]);
  }
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(std::make_unique<GridAllreduce>(
        network.executor(rank),
        reinterpret_cast<std::byte*>(data[static_cast<size_t>(rank)].data()), 4 * count,
        Reducer(DType::kFloat32, reduction, size), rank, size, columns, segment_bytes));
  }
  CHECK(network.run(parts));
  CHECK(network.most_receives <= kReceives && network.most_sends <= kSends);
  const double divisor = reduction == Reduction::kAverage ? size : 1;
  bool is_right = true;
  for (size_t i = 0; i < count; ++i) {
    is_right &= std::abs(static_cast<double>(data[0][i]) - sums[i] / divisor) <= 1e-6 * sums[i];
  }
  CHECK(is_right);
  for (const auto& its : data) CHECK(its == data[0]);
  // What any allreduce sends at least, but for chunks that are as long as the longest.
  const size_t most = 2 * (4 * count + 64 * static_cast<size_t>(2 * size));
  for (const auto& sent : network.traffic) CHECK(sent.bytes <= static_cast<int64_t>(most));
}

void grid_allreduces(uint64_t seed) {
  for (const auto& [size, columns] : std::vector<std::pair<int, int>>{
           {4, 2}, {6, 3}, {6, 2}, {8, 4}, {9, 3}, {12, 4}, {5, 5}, {3, 1}, {1, 1}}) {
    for (const size_t count : {0u, 1u, 7u, 300u, 4099u}) {
      for (const size_t segment_bytes : {64u, 1024u, 1u << 20}) {
        grid_allreduce(size, columns, count, segment_bytes, seed);
      }
    }
  }
}

void chooses_a_grid() {
  for (const auto& [size, columns] :
       std::vector<std::pair<int, int>>{{1, 1}, {4, 2}, {6, 3}, {7, 7}, {36, 6}, {512, 32}}) {
    CHECK_EQ(grid_columns(size), columns);
  }
}

// The tree as it is drawn in the paper: pairs of the first ranks, then halves of halves.
Bytes expected_doubling(const std::vector<Bytes>& data, const Reducer& reducer) {
  const size_t full = std::bit_floor(data.size());
  const size_t extra = data.size() - full;
  std::vector<Bytes> parts;
  for (size_t rank = 0; rank < data.size(); ++rank) {
    if (rank < 2 * extra && rank % 2 == 1) {
      reducer.combine(parts.back().data(), data[rank].data(), data[rank].size());
    } else {
      parts.push_back(data[rank]);
    }
  }
  while (parts.size() > 1) {
    std::vector<Bytes> halves;
    for (size_t i = 0; i < parts.size(); i += 2) {
      Bytes half = parts[i];
      if (parts.size() == 2) {
        reducer.finish(half.data(), parts[1].data(), half.size());
      } else {
        reducer.combine(half.data(), parts[i + 1].data(), half.size());
      }
      halves.push_back(half);
    }
    parts = halves;
  }
  return parts[0];
}

void doubling_in_segments(std::vector<Bytes> data, DType dtype, Reduction reduction, uint64_t seed,
                          const Bytes* plain, size_t segment_bytes) {
  const int size = static_cast<int>(data.size());
  const Reducer reducer(dtype, reduction, size);
  const Bytes expected = expected_doubling(data, reducer);
  const auto bytes = static_cast<int64_t>(expected.size());
  Network network(size, seed);
  Parts parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(std::make_unique<RecursiveDoubling>(network.executor(rank), data[rank].data(),
                                                        data[rank].size(), reducer, rank, size,
                                                        segment_bytes));
  }
  CHECK(network.run(parts));
  const auto in_segments = (expected.size() + segment_bytes - 1) / segment_bytes;
  const auto segments = static_cast<int>(std::max<size_t>(in_segments, 1));
  CHECK(network.most_receives <= std::min<int64_t>(segments, RecursiveDoubling::kDepth));
  CHECK(network.most_sends <= std::min<int64_t>(segments, 2 * RecursiveDoubling::kDepth));
  const int full = static_cast<int>(std::bit_floor(data.size()));
  for (int rank = 0; rank < size; ++rank) {
    CHECK(data[rank] == expected);
    if (plain != nullptr) CHECK(data[rank] == *plain);
    const bool paired = rank < 2 * (size - full);
    const int rounds = std::countr_zero(data.size() - static_cast<size_t>(size - full));
    const int messages = paired && rank % 2 == 0 ? 1 : rounds + (paired ? 1 : 0);
    CHECK_EQ(network.traffic[rank].messages, messages * segments);
    CHECK_EQ(network.traffic[rank].bytes, messages * bytes);
  }
}

void doubling(const std::vector<Bytes>& data, DType dtype, Reduction reduction, uint64_t seed,
              const Bytes* plain = nullptr) {
  for (const size_t segment_bytes : {1 << 20, 24}) {
    doubling_in_segments(data, dtype, reduction, seed, plain, segment_bytes);
  }
}

void doublings(int size, uint64_t seed) {
  for (const size_t count : {0u, 1u, 5u, 333u}) {
    std::vector<Bytes> integers;
    std::vector<int32_t> averages(count, 0);
    std::vector<Bytes> numbers;
    std::vector<Bytes> halfs;
    std::vector<Bytes> not_numbers;
    for (int rank = 0; rank < size; ++rank) {
      std::vector<int32_t> own(count);
      for (size_t i = 0; i < count; ++i) {
        own[i] = static_cast<int32_t>(i * 31 + static_cast<size_t>(rank) * 17) % 1000 - 400;
        averages[i] += own[i];
      }
      integers.push_back(bytes_of(own));
      std::vector<float> items = floats(rank, count);
      numbers.push_back(bytes_of(items));
      halfs.push_back(noise(static_cast<uint64_t>(rank), count * 2));  // some are NaN
      for (size_t i = static_cast<size_t>(rank); i < count; i += 3) {
        const uint32_t payload = 0xffa00000u + static_cast<uint32_t>(rank);
        items[i] = std::bit_cast<float>(payload);
      }
      not_numbers.push_back(bytes_of(items));
    }
    for (int32_t& average : averages) average /= size;
    const Bytes plain = bytes_of(averages);
    doubling(integers, DType::kInt32, Reduction::kAverage, seed, &plain);
    doubling(numbers, DType::kFloat32, Reduction::kAverage, seed);
    doubling(not_numbers, DType::kFloat32, Reduction::kSum, seed);
    doubling(not_numbers, DType::kFloat32, Reduction::kMax, seed);
    doubling(halfs, DType::kBFloat16, Reduction::kAverage, seed);
    doubling(halfs, DType::kFloat16, Reduction::kAverage, seed);
  }
}

// How many bytes rank `from` has for rank `to`; some have none.
int64_t block_bytes(int from, int to, int64_t scale) {
  return (from + 2 * to) % 3 == 1 ? 0 : scale * (1 + (from * 5 + to * 3) % 7) / 4;
}

void alltoall(int size, int64_t scale, size_t segment_bytes, uint64_t seed) {
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs(static_cast<size_t>(size));
  std::vector<std::vector<int64_t>> lengths(static_cast<size_t>(size));
  std::vector<Network::Traffic> traffic(static_cast<size_t>(size));
  Network network(size, seed);
  Parts parts;
  for (int from = 0; from < size; ++from) {
    Bytes& input = inputs.emplace_back();
    std::vector<int64_t> send_bytes;
    for (int to = 0; to < size; ++to) {
      send_bytes.push_back(block_bytes(from, to, scale));
      const Bytes block =
          noise(static_cast<uint64_t>(from * size + to), static_cast<size_t>(send_bytes.back()));
      input.insert(input.end(), block.begin(), block.end());
      outputs[to].insert(outputs[to].end(), block.begin(), block.end());
      lengths[to].push_back(send_bytes.back());
      if (to == from) continue;
      traffic[from].messages += 1 + segments(send_bytes.back(), segment_bytes);
      traffic[from].bytes += 8 + send_bytes.back();
    }
    parts.push_back(std::make_unique<Alltoall>(network.executor(from), input.data(), send_bytes,
                                               from, size, segment_bytes));
  }
  const std::vector<Bytes> before = inputs;
  CHECK(network.run(parts));
  CHECK(network.most_receives <= kReceives && network.most_sends <= kSends);
  CHECK(inputs == before);
  for (int rank = 0; rank < size; ++rank) {
    auto& part = static_cast<Alltoall&>(*parts[rank]);
    CHECK(part.gathered()->lengths == lengths[rank]);
    CHECK_EQ(part.gathered()->data.size(), outputs[rank].size());
    CHECK(equal(part.gathered()->data.data(), outputs[rank]));
    CHECK_EQ(network.traffic[rank].messages, traffic[rank].messages);
    CHECK_EQ(network.traffic[rank].bytes, traffic[rank].bytes);
  }
}

void gather_and_scatter(int size, int root, int64_t scale, size_t segment_bytes, uint64_t seed) {
  std::vector<Bytes> blocks;
  std::vector<int64_t> lengths;
  Bytes all;
  for (int rank = 0; rank < size; ++rank) {
    lengths.push_back(block_bytes(rank, root, scale));
    blocks.push_back(noise(static_cast<uint64_t>(rank), static_cast<size_t>(lengths.back())));
    all.insert(all.end(), blocks.back().begin(), blocks.back().end());
  }
  Network up(size, seed);
  Network down(size, seed);
  Parts gathers;
  Parts scatters;
  for (int rank = 0; rank < size; ++rank) {
    gathers.push_back(std::make_unique<Gather>(up.executor(rank), blocks[rank].data(),
                                               blocks[rank].size(), root, rank, size,
                                               segment_bytes));
    scatters.push_back(std::make_unique<Scatter>(
        down.executor(rank), rank == root ? all.data() : nullptr,
        rank == root ? lengths : std::vector<int64_t>{}, root, rank, size, segment_bytes));
  }
  CHECK(up.run(gathers) && down.run(scatters));
  Network::Traffic from_root;
  for (int rank = 0; rank < size; ++rank) {
    auto& gather = static_cast<Gather&>(*gathers[rank]);
    auto& scatter = static_cast<Scatter&>(*scatters[rank]);
    CHECK(gather.gathered()->lengths == (rank == root ? lengths : std::vector<int64_t>{}));
    CHECK_EQ(gather.gathered()->data.size(), rank == root ? all.size() : 0u);
    if (rank == root) CHECK(equal(gather.gathered()->data.data(), all));
    CHECK_EQ(scatter.gathered()->data.size(), blocks[rank].size());
    CHECK(equal(scatter.gathered()->data.data(), blocks[rank]));
    if (rank == root) continue;
    const int64_t messages = 1 + segments(lengths[rank], segment_bytes);
    const int64_t bytes = 8 + lengths[rank];
    CHECK_EQ(up.traffic[rank].messages, messages);
    CHECK_EQ(up.traffic[rank].bytes, bytes);
    CHECK_EQ(down.traffic[rank].messages, 1);
    CHECK_EQ(down.traffic[rank].bytes, 0);
    from_root.messages += messages;
    from_root.bytes += bytes;
  }
  CHECK_EQ(up.traffic[root].messages, size - 1);
  CHECK_EQ(up.traffic[root].bytes, 0);
  CHECK_EQ(down.traffic[root].messages, from_root.messages);
  CHECK_EQ(down.traffic[root].bytes, from_root.bytes);
  for (const Network* network : {&up, &down}) {
    CHECK(network->most_receives <= kReceives && network->most_sends <= kSends);
  }
}

// Ranks in any order: what they get is the same.
void in_order(int size, int64_t scale, size_t segment_bytes, uint64_t seed) {
  const size_t few_bytes = seed % 2 == 0 ? 0 : 8 << 10;
  std::vector<int> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  std::vector<Bytes> blocks;
  std::vector<int64_t> lengths;
  Bytes all;
  for (int rank = 0; rank < size; ++rank) {
    lengths.push_back(block_bytes(rank, 0, scale));
    blocks.push_back(noise(static_cast<uint64_t>(rank), static_cast<size_t>(lengths.back())));
    all.insert(all.end(), blocks.back().begin(), blocks.back().end());
  }
  Network network(size, seed);
  Parts parts;
  for (int rank = 0; rank < size; ++rank) {
    const int place = static_cast<int>(std::find(order.begin(), order.end(), rank) - order.begin());
    parts.push_back(std::make_unique<InOrder>(
        order, rank,
        std::make_unique<Allgather>(network.executor(rank), blocks[rank].data(),
                                    blocks[rank].size(), order, place, segment_bytes, few_bytes)));
  }
  CHECK(network.run(parts));
  const bool has_rounds = all.size() <= few_bytes;
  const int rounds = std::bit_width(static_cast<unsigned>(size - 1));
  for (int rank = 0; rank < size; ++rank) {
    if (has_rounds) CHECK(network.traffic[rank].messages <= 1 + 2 * rounds);
    CHECK(parts[rank]->gathered()->lengths == lengths);
    CHECK(equal(parts[rank]->gathered()->data.data(), all));
  }
}

// Every rank has every block after log2 P messages, each of which carries what the other lacks.
void rounds(int size, int64_t scale, uint64_t seed) {
  std::vector<size_t> lengths;
  std::vector<Bytes> blocks;
  size_t total = 0;
  for (int rank = 0; rank < size; ++rank) {
    lengths.push_back(static_cast<size_t>(block_bytes(rank, 0, scale)));
    blocks.push_back(noise(static_cast<uint64_t>(rank), lengths.back()));
    total += lengths.back();
  }
  Network network(size, seed);
  Parts parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(
        std::make_unique<Bruck>(network.executor(rank), lengths, rank, blocks[rank].data()));
  }
  CHECK(network.run(parts));
  int64_t sent = 0;
  for (int rank = 0; rank < size; ++rank) {
    const auto& part = static_cast<Bruck&>(*parts[rank]);
    CHECK(part.is_complete());
    for (int other = 0; other < size; ++other) CHECK(equal(part.block(other), blocks[other]));
    CHECK(network.traffic[rank].messages <= std::bit_width(static_cast<unsigned>(size - 1)));
    sent += network.traffic[rank].bytes;
  }
  CHECK_EQ(sent, static_cast<int64_t>(total) * (size - 1));
}

// Data crosses each edge of a binomial tree once; a message for each round, segments for data.
void tree_broadcast(int size, int root, size_t bytes, size_t segment_bytes, uint64_t seed) {
  const Bytes expected = noise(seed, bytes);
  std::vector<Bytes> data(static_cast<size_t>(size), Bytes(bytes));
  data[static_cast<size_t>(root)] = expected;
  Network network(size, seed);
  Parts parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(
        std::make_unique<TreeBroadcast>(data[rank].data(), bytes, root, rank, size, segment_bytes));
  }
  CHECK(network.run(parts));
  CHECK(network.most_receives <= kReceives && network.most_sends <= kSends);
  const int64_t in_segments = segments(static_cast<int64_t>(bytes), segment_bytes);
  const int64_t rounds = std::bit_width(static_cast<unsigned>(size - 1));
  int64_t sent = 0;
  for (int rank = 0; rank < size; ++rank) {
    CHECK(data[rank] == expected);
    CHECK(network.traffic[rank].messages <= rounds * std::max<int64_t>(in_segments, 1));
    sent += network.traffic[rank].bytes;
  }
  CHECK_EQ(network.traffic[root].bytes, rounds * static_cast<int64_t>(bytes));
  CHECK_EQ(sent, static_cast<int64_t>(bytes) * (size - 1));
}

// The chain has P-1 ranks, whatever the size; the tree has log2 P rounds, each of all segments.
void chooses_the_tree() {
  CHECK(!TreeBroadcast::is_faster(8, 2, 1024));
  CHECK(!TreeBroadcast::is_faster(8, 3, 1024));
  CHECK(TreeBroadcast::is_faster(8, 4, 1024));
  CHECK(TreeBroadcast::is_faster(1024, 4, 1024));
  CHECK(!TreeBroadcast::is_faster(1025, 4, 1024));
  CHECK(TreeBroadcast::is_faster(12 << 10, 64, 1024));
  CHECK(!TreeBroadcast::is_faster(13 << 10, 64, 1024));
  CHECK(TreeBroadcast::is_faster(0, 1000, 1024));
}

// One rank passes something else, in one case another root: no rank may finish.
void disagreements(int size, uint64_t seed) {
  enum {
    kReduceScatter,
    kDoubling,
    kAlltoall,
    kGather,
    kScatter,
    kBroadcast,
    kBroadcastInOrder,
    kAllgatherInOrder,
    kRounds,
    kTreeBroadcast,
    kGridAllreduce,
    kCount
  };
  std::vector<int> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  for (int kind = 0; kind < kCount; ++kind) {
    for (int wrong = 0; wrong < size; ++wrong) {
      Network network(size, seed);
      network.headers[wrong] = 1;
      std::vector<Bytes> data;
      std::vector<Bytes> outputs(static_cast<size_t>(size), Bytes(64));
      const std::vector<Span> chunks = row_partition(size, 64, size);
      const Reducer reducer(DType::kFloat32, Reduction::kSum, size);
      const std::vector<int64_t> even(static_cast<size_t>(size), 64);
      Parts parts;
      for (int rank = 0; rank < size; ++rank) {
        const std::byte* input = data.emplace_back(static_cast<size_t>(size) * 64).data();
        const int place =
            static_cast<int>(std::find(order.begin(), order.end(), rank) - order.begin());
        const int root = rank == wrong ? 1 : 0;
        std::unique_ptr<Collective>& part = parts.emplace_back();
        if (kind == kReduceScatter) {
          part = std::make_unique<RingReduceScatter>(
              network.executor(rank), input, outputs[rank].data(), chunks, reducer, rank, 16);
        } else if (kind == kDoubling) {
          part = std::make_unique<RecursiveDoubling>(network.executor(rank), outputs[rank].data(),
                                                     64, reducer, rank, size, 1024);
        } else if (kind == kAlltoall) {
          part = std::make_unique<Alltoall>(network.executor(rank), input, even, rank, size, 16);
        } else if (kind == kBroadcast) {
          part = std::make_unique<Broadcast>(outputs[rank].data(), 64, 0, rank, size, 16);
        } else if (kind == kBroadcastInOrder) {
          part = std::make_unique<InOrder>(
              order, rank,
              std::make_unique<Broadcast>(outputs[rank].data(), 64, 0, place, size, 16));
        } else if (kind == kAllgatherInOrder) {
          part = std::make_unique<InOrder>(
              order, rank,
              std::make_unique<Allgather>(network.executor(rank), input, 64, order, place, 16, 0));
        } else if (kind == kRounds) {
          part = std::make_unique<Bruck>(
              network.executor(rank), std::vector<size_t>(even.begin(), even.end()), rank, input);
        } else if (kind == kGridAllreduce) {
          part = std::make_unique<GridAllreduce>(network.executor(rank), outputs[rank].data(), 64,
                                                 reducer, rank, size, grid_columns(size), 16);
        } else if (kind == kTreeBroadcast) {
          part = std::make_unique<TreeBroadcast>(outputs[rank].data(), 64, 0, rank, size, 16);
        } else if (kind == kGather) {
          part = std::make_unique<Gather>(network.executor(rank), input, 64, root, rank, size, 16);
        } else {
          part =
              std::make_unique<Scatter>(network.executor(rank), input, even, root, rank, size, 16);
        }
      }
      CHECK(!network.run(parts));
      CHECK(network.finished.empty());
      for (const auto& part : parts) CHECK(!part->describe().empty());
    }
  }
}

}  // namespace

int main() {
  partitions_rows();
  for (int size = 1; size <= kLargestSize; ++size) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      reduce_scatters(size, seed);
      doublings(size, seed);
      for (const int64_t scale : {0, 3, 400, 2000}) {
        for (const size_t segment_bytes : {16u, 100u, 4096u}) {
          if (scale == 2000 && segment_bytes == 16u) continue;
          alltoall(size, scale, segment_bytes, seed);
          if (size > 1) in_order(size, scale, segment_bytes, seed);
          gather_and_scatter(size, static_cast<int>(seed) % size, scale, segment_bytes, seed);
        }
      }
      if (size > 1) disagreements(size, seed);
    }
  }
  chooses_the_tree();
  chooses_a_grid();
  for (uint64_t seed = 0; seed < 12; ++seed) grid_allreduces(seed);
  for (const int size : {1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 31}) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      for (const int64_t scale : {0, 3, 400}) rounds(size, scale, seed);
      for (const size_t bytes : {0u, 1u, 64u, 999u}) {
        tree_broadcast(size, static_cast<int>(seed * 3) % size, bytes, 64, seed);
      }
    }
  }
  return check::report();
}

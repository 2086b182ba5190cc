// Collectives that reduce, on ranks that are objects of one thread: sums in the order that they
// promise, and what they send for them.

#include <bit>
#include <cmath>

#include "collective/messages/grid_allreduce.h"
#include "collective/messages/recursive_doubling.h"
#include "collective/messages/ring_reduce_scatter.h"
#include "collective/row_partition.h"
#include "network.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

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

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    for (int size = 1; size <= 8; ++size) {
      reduce_scatters(size, seed);
      doublings(size, seed);
    }
    grid_allreduces(seed);
  }
  chooses_a_grid();
  return report();
}

// Collectives that reduce nothing, on ranks that are objects of one thread, whose messages move in
// orders drawn from a seed: results and traffic.

#include <numeric>

#include "collective/messages/alltoall.h"
#include "collective/messages/broadcast.h"
#include "collective/messages/bruck.h"
#include "collective/messages/gather.h"
#include "collective/messages/in_order.h"
#include "collective/messages/scatter.h"
#include "collective/messages/tree_broadcast.h"
#include "collective/two_level/allgather.h"
#include "network.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

bool equal(const std::byte* data, const Bytes& expected) {
  return std::equal(expected.begin(), expected.end(), data);
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

}  // namespace

int main() {
  for (int size = 1; size <= 8; ++size) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      for (const int64_t scale : {0, 3, 400, 2000}) {
        for (const size_t segment_bytes : {16u, 100u, 4096u}) {
          if (scale == 2000 && segment_bytes == 16u) continue;
          alltoall(size, scale, segment_bytes, seed);
          if (size > 1) in_order(size, scale, segment_bytes, seed);
          gather_and_scatter(size, static_cast<int>(seed) % size, scale, segment_bytes, seed);
        }
      }
    }
  }
  chooses_the_tree();
  for (const int size : {1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 31}) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      for (const int64_t scale : {0, 3, 400}) rounds(size, scale, seed);
      for (const size_t bytes : {0u, 1u, 64u, 999u}) {
        tree_broadcast(size, static_cast<int>(seed * 3) % size, bytes, 64, seed);
      }
    }
  }
  return report();
}

// Ranks whose calls disagree: nobody finishes.

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
using namespace ringdl::check;

namespace {

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
  for (int size = 2; size <= 8; ++size) {
    for (uint64_t seed = 0; seed < 12; ++seed) disagreements(size, seed);
  }
  return report();
}

#include "simulation/predict.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>

#include "base/error.h"
#include "simulation/phantom.h"
#include "simulation/simulation.h"

namespace ringdl {
namespace {

// Of each rank, for its stages; their content is nobody's, but they have addresses.
constexpr size_t kLeastWindow = 64 << 20;
constexpr size_t kMostWindow = size_t{8} << 30;
constexpr int64_t kLongestNs = 86'400 * kSecond;
constexpr int kDonePerInterrupt = 1 << 14;

}  // namespace

CostModel costs_of(const ImaginedCluster& cluster) {
  const int64_t step_ns = cluster.link.latency_ns + 2 * cluster.message_ns;
  const Cost cost{static_cast<double>(step_ns) / kSecond, 1 / cluster.link.bytes_per_second};
  CostModel model = default_costs();
  for (Cost& its : model.between) {
    if (its.byte_seconds > 0) its = cost;
  }
  return model;
}

Prediction predict_allreduces(const ImaginedCluster& cluster, std::span<const ReadyArray> arrays,
                              std::optional<Algorithm> wanted,
                              const std::function<void()>& interrupted) {
  if (arrays.empty()) throw UsageError("there is no array to simulate an allreduce of");
  size_t bytes = 1;  // of all, which lie one after the other, each at a multiple of 64
  for (const ReadyArray& array : arrays) bytes += (array.bytes + 63) / 64 * 64;
  const PhantomMemory memory(bytes);
  SimulatedNetworkOptions network;
  network.hosts = cluster.hosts;
  network.link = cluster.link;
  network.memory = cluster.memory;
  network.message_ns = cluster.message_ns;
  network.eager_bytes = cluster.eager_bytes;
  network.phantom = memory.bytes();
  SimulatedProcessor processor = cluster.processor;
  processor.computes = false;
  EngineOptions options;
  options.segment_bytes = cluster.segment_bytes;
  const std::set<int> hosts(cluster.hosts.begin(), cluster.hosts.end());
  const bool is_shared = cluster.shares_memory && hosts.size() < cluster.hosts.size();
  const size_t window = std::min(kLeastWindow + 2 * bytes, kMostWindow);
  Simulation simulation(network, processor, options, is_shared ? window : 0);

  std::vector<std::vector<std::shared_ptr<Work>>> works(arrays.size());
  const int64_t begin = simulation.now_ns();
  const CostModel costs = costs_of(cluster);
  for (int rank = 0; rank < simulation.size(); ++rank) {
    simulation[rank].parts().planning.choose_by(costs, wanted);
  }
  size_t offset = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    Call call;
    call.kind = Kind::kAllreduce;
    call.dtype = DType::kFloat32;
    call.shape = {static_cast<int64_t>(arrays[i].bytes / sizeof(float))};
    call.name = "array " + std::to_string(i);
    call.algorithm = wanted;
    void* const data = static_cast<std::byte*>(memory.data()) + offset;
    offset += (arrays[i].bytes + 63) / 64 * 64;
    const auto submit = [&simulation, &its = works[i], call, data] {
      for (int rank = 0; rank < simulation.size(); ++rank) {
        its.push_back(simulation.submit(rank, call, data));
      }
    };
    if (arrays[i].ready_ns <= 0) {
      submit();
    } else {
      simulation.network().call_at(begin + arrays[i].ready_ns, submit);
    }
  }
  size_t array = 0;  // the first that has not ended, and the first rank where it has not
  size_t rank = 0;
  int asked = 0;
  const bool are_done = simulation.run_until(
      [&] {
        if (interrupted && ++asked % kDonePerInterrupt == 0) interrupted();
        while (array < works.size() && rank < works[array].size() && works[array][rank]->ended()) {
          if (++rank == works[array].size()) ++array, rank = 0;
        }
        return array == works.size();
      },
      kLongestNs);
  if (!are_done) throw Error("the simulated allreduces take longer than a day");

  Prediction prediction{};
  int64_t end = begin;
  int64_t busiest_ns = 0;
  for (int each = 0; each < simulation.size(); ++each) {
    end = std::max(end, simulation.free_ns(each));
    busiest_ns = std::max(busiest_ns, simulation.network().busy_ns(each));
  }
  for (const auto& of_array : works) {
    for (const auto& work : of_array) {
      if (work->failure) work->failure.raise();
    }
    prediction.algorithms.push_back(of_array.front()->description.algorithm);
  }
  for (int host = 0; host < simulation.network().hosts(); ++host) {
    prediction.most_link_bytes =
        std::max(prediction.most_link_bytes, simulation.network().bytes_sent(host));
  }
  prediction.seconds = static_cast<double>(end - begin) / kSecond;
  prediction.busiest_seconds = static_cast<double>(busiest_ns) / kSecond;
  prediction.messages = simulation.network().messages_sent();
  return prediction;
}

}  // namespace ringdl

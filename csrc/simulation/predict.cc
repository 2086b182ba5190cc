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

constexpr size_t kWindowBytes = 64 << 20;  // beside two arrays' worth of stages
constexpr int64_t kLongestNs = 100'000 * kSecond;
constexpr int kDonePerInterrupt = 1 << 14;

}  // namespace

Prediction predict_allreduce(const ImaginedCluster& cluster, size_t bytes,
                             std::optional<Algorithm> wanted,
                             const std::function<void()>& interrupted) {
  const PhantomMemory memory(std::max<size_t>(bytes, 1));
  SimulatedNetworkOptions network;
  network.hosts = cluster.hosts;
  network.link = cluster.link;
  network.memory = cluster.memory;
  network.message_ns = cluster.message_ns;
  network.phantom = memory.bytes();
  SimulatedProcessor processor = cluster.processor;
  processor.computes = false;
  EngineOptions options;
  options.segment_bytes = cluster.segment_bytes;
  const std::set<int> hosts(cluster.hosts.begin(), cluster.hosts.end());
  const bool is_shared = cluster.shares_memory && hosts.size() < cluster.hosts.size();
  Simulation simulation(network, processor, options, is_shared ? kWindowBytes + 2 * bytes : 0);

  Call call;
  call.kind = Kind::kAllreduce;
  call.dtype = DType::kFloat32;
  call.shape = {static_cast<int64_t>(bytes / sizeof(float))};
  call.name = "predicted";
  call.algorithm = wanted;
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < simulation.size(); ++rank) {
    works.push_back(simulation.submit(rank, call, memory.data()));
  }
  const int64_t begin = simulation.now_ns();
  size_t ended = 0;
  int asked = 0;
  const bool is_done = simulation.run_until(
      [&] {
        if (interrupted && ++asked % kDonePerInterrupt == 0) interrupted();
        while (ended < works.size() && works[ended]->ended()) ++ended;
        return ended == works.size();
      },
      kLongestNs);
  if (!is_done) throw Error("the simulated allreduce does not end");
  int64_t end = begin;
  for (int rank = 0; rank < simulation.size(); ++rank) {
    const Work& work = *works[static_cast<size_t>(rank)];
    if (work.failure) work.failure.raise();
    end = std::max(end, simulation.free_ns(rank));
  }
  uint64_t most = 0;
  for (int host = 0; host < simulation.network().hosts(); ++host) {
    most = std::max(most, simulation.network().bytes_sent(host));
  }
  return {static_cast<double>(end - begin) / kSecond, most, simulation.network().messages_sent(),
          works.front()->description.algorithm};
}

}  // namespace ringdl

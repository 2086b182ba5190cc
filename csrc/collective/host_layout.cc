#include "collective/host_layout.h"

#include <algorithm>
#include <map>

namespace ringdl {

HostLayout HostLayout::of(const std::vector<int>& host_of_rank, int rank) {
  HostLayout layout;
  std::map<int, size_t> place_of_host;
  for (size_t i = 0; i < host_of_rank.size(); ++i) {
    const auto place = place_of_host.emplace(host_of_rank[i], layout.hosts.size()).first->second;
    if (place == layout.hosts.size()) layout.hosts.emplace_back();
    if (static_cast<int>(i) == rank) {
      layout.host = static_cast<int>(place);
      layout.local_rank = static_cast<int>(layout.hosts[place].size());
    }
    layout.hosts[place].push_back(static_cast<int>(i));
  }
  return layout;
}

int HostLayout::size() const {
  size_t ranks = 0;
  for (const auto& host_ranks : hosts) ranks += host_ranks.size();
  return static_cast<int>(ranks);
}

int HostLayout::lanes() const {
  size_t fewest = hosts[0].size();
  for (const auto& ranks : hosts) fewest = std::min(fewest, ranks.size());
  return static_cast<int>(fewest);
}

}  // namespace ringdl

#pragma once

#include <memory>
#include <vector>

namespace ringdl {

/// Which ranks are on which host: those that share memory. Without shared memory each rank is on
/// one of its own.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  // ranks by host, ascending; hosts by their lowest rank
  int host = 0;                         // this rank's host, and its place there
  int local_rank = 0;

  /// @param host_of_rank  an arbitrary number for each rank's host
  static HostLayout of(const std::vector<int>& host_of_rank, int rank);

  const std::vector<int>& local_ranks() const { return hosts[static_cast<size_t>(host)]; }
  int local_size() const { return static_cast<int>(local_ranks().size()); }
  int host_count() const { return static_cast<int>(hosts.size()); }
  /// All ranks.
  int size() const;
  /// Rings between the hosts: as many as the smallest host has ranks.
  int lanes() const;
};

using SharedLayout = std::shared_ptr<const HostLayout>;

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace ringdl {

/// What a message passes on its way.
struct SimulatedLink {
  double bytes_per_second;
  int64_t latency_ns;
};

/// When messages leave and arrive. Pure: it is told what time it is.
///
/// A host has a link to a switch that has no bound of its own. Each direction of a link carries one
/// message at a time, in the order in which they come; a message is on both links at once, so it
/// takes bytes / rate + latency where nothing else is in its way (the LogGP model, Alexandrov and
/// others 1995, with a gap per host).
///
///     host a  --- sends --->  [switch]  --- receives --->  host b
class Links {
 public:
  /// @param hosts  the number of each rank's host, from 0 on
  /// @param link  of each host, in each direction; the latency is that from one host to another
  /// @param memory  between ranks of a host, which do not slow each other
  /// @param message_ns  what a processor does for each message that it sends or receives
  Links(std::vector<int> hosts, SimulatedLink link, SimulatedLink memory, int64_t message_ns);

  int ranks() const { return static_cast<int>(hosts_of_ranks_.size()); }
  int hosts() const { return static_cast<int>(hosts_.size()); }
  int host_of(int rank) const { return hosts_of_ranks_[static_cast<size_t>(rank)]; }
  bool are_together(int a, int b) const { return host_of(a) == host_of(b); }
  int64_t latency_ns(int from, int to) const {
    return (are_together(from, to) ? memory_ : link_).latency_ns;
  }

  /// A message leaves its host, or goes to a rank of that.
  /// @param latency_ns  latency_ns(), or longer
  /// @returns  when it is at the other host's link, and is to enter() that; inside a host, when it
  ///     arrives
  int64_t leave(int from, int to, size_t bytes, int64_t now_ns, int64_t latency_ns);
  /// It is at the link of the other host. Of messages from several hosts, those that are there
  /// first go first.
  /// @returns  when it arrives; the processor of the one that it comes to is to be told: see took()
  int64_t enter(int from, int to, size_t bytes, int64_t now_ns);
  /// A rank's processor is busy for so long: what it sends leaves later.
  void compute(int rank, int64_t now_ns, int64_t duration_ns);
  /// A rank has a message now: its processor was busy with that, if it had nothing else to do.
  void took(int rank, int64_t now_ns) { compute(rank, now_ns - message_ns_, message_ns_); }
  /// When that ends.
  int64_t free_ns(int rank) const { return ranks_[static_cast<size_t>(rank)].free_ns; }
  /// For how long it has been busy so far, in all.
  int64_t busy_ns(int rank) const { return ranks_[static_cast<size_t>(rank)].busy_ns; }
  /// A host's link is so many times slower from now on.
  void slow(int host, double times) { hosts_[static_cast<size_t>(host)].slower = times; }
  /// Bytes that a host's link has carried away from it.
  uint64_t bytes_sent(int host) const { return hosts_[static_cast<size_t>(host)].bytes_sent; }

 private:
  int64_t duration_ns(int from, int to, size_t bytes) const;  // on their hosts' links

  struct Rank {
    int64_t free_ns = 0;  // its processor
    int64_t busy_ns = 0;
    int64_t memory_free_ns = 0;  // what it sends to ranks of its host
  };
  struct Host {
    int64_t out_free_ns = 0;
    int64_t in_free_ns = 0;
    double slower = 1;
    uint64_t bytes_sent = 0;
  };

  const std::vector<int> hosts_of_ranks_;
  const SimulatedLink link_;
  const SimulatedLink memory_;
  const int64_t message_ns_;
  std::vector<Rank> ranks_;
  std::vector<Host> hosts_;
};

}  // namespace ringdl

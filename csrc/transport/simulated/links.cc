#include "transport/simulated/links.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

int64_t nanoseconds(size_t bytes, double bytes_per_second) {
  return static_cast<int64_t>(static_cast<double>(bytes) / bytes_per_second * kSecond);
}

size_t count_hosts(const std::vector<int>& hosts) {
  if (hosts.empty()) throw UsageError("a simulated network needs at least one rank");
  return 1 + static_cast<size_t>(std::ranges::max(hosts));
}

}  // namespace

Links::Links(std::vector<int> hosts, SimulatedLink link, SimulatedLink memory, int64_t message_ns)
    : hosts_of_ranks_(std::move(hosts)),
      link_(link),
      memory_(memory),
      message_ns_(message_ns),
      ranks_(hosts_of_ranks_.size()),
      hosts_(count_hosts(hosts_of_ranks_)) {}

int64_t Links::leave(int from, int to, size_t bytes, int64_t now_ns, int64_t latency_ns) {
  compute(from, now_ns, message_ns_);
  Rank& sender = ranks_[static_cast<size_t>(from)];
  if (are_together(from, to)) {
    sender.memory_free_ns = std::max(sender.free_ns, sender.memory_free_ns) +
                            nanoseconds(bytes, memory_.bytes_per_second);
    return sender.memory_free_ns + latency_ns + message_ns_;
  }
  Host& source = hosts_[static_cast<size_t>(host_of(from))];
  const int64_t begin = std::max(sender.free_ns, source.out_free_ns);
  source.out_free_ns = begin + duration_ns(from, to, bytes);
  source.bytes_sent += bytes;
  return begin + latency_ns;
}

int64_t Links::enter(int from, int to, size_t bytes, int64_t now_ns) {
  Host& target = hosts_[static_cast<size_t>(host_of(to))];
  target.in_free_ns = std::max(now_ns, target.in_free_ns) + duration_ns(from, to, bytes);
  return target.in_free_ns + message_ns_;
}

int64_t Links::duration_ns(int from, int to, size_t bytes) const {
  const double slower = std::max(hosts_[static_cast<size_t>(host_of(from))].slower,
                                 hosts_[static_cast<size_t>(host_of(to))].slower);
  return nanoseconds(bytes, link_.bytes_per_second / slower);
}

void Links::compute(int rank, int64_t now_ns, int64_t duration_ns) {
  Rank& its = ranks_[static_cast<size_t>(rank)];
  its.free_ns = std::max(its.free_ns, now_ns) + duration_ns;
  its.busy_ns += duration_ns;
}

}  // namespace ringdl

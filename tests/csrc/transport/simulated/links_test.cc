// When messages leave and arrive.

#include "transport/simulated/links.h"

#include "check.h"

using namespace ringdl;

namespace {

constexpr int64_t kLatency = kMicrosecond;
constexpr size_t kMany = 100'000'000;  // 100 ms

Links four_hosts() { return {{0, 1, 2, 3}, {1e9, kLatency}, {8e9, 0}, 0}; }

void test_a_message_takes_its_bytes_and_a_latency() {
  Links links = four_hosts();
  const int64_t there = links.leave(0, 1, kMany, 0, kLatency);
  CHECK(there == kLatency);
  CHECK(links.enter(0, 1, kMany, there) == kLatency + kSecond / 10);
  CHECK(links.bytes_sent(0) == kMany);
}

// What is there first goes first: not what was sent first, and is still on its sender's link.
void test_links_carry_what_is_there() {
  Links links = four_hosts();
  links.leave(0, 1, kMany, 0, kLatency);
  const int64_t behind = links.leave(0, 2, 1000, 0, kLatency);
  CHECK(behind == kSecond / 10 + kLatency);
  const int64_t other = links.leave(3, 2, 1000, 0, kLatency);
  CHECK(links.enter(3, 2, 1000, other) == kLatency + kMicrosecond);
  CHECK(links.enter(0, 2, 1000, behind) == behind + kMicrosecond);
}

void test_messages_to_one_host_share_its_link() {
  Links links = four_hosts();
  const int64_t first = links.leave(0, 2, kMany, 0, kLatency);
  const int64_t second = links.leave(1, 2, kMany, 0, kLatency);
  links.enter(0, 2, kMany, first);
  CHECK(links.enter(1, 2, kMany, second) == kLatency + kSecond / 5);
}

}  // namespace

int main() {
  test_a_message_takes_its_bytes_and_a_latency();
  test_links_carry_what_is_there();
  test_messages_to_one_host_share_its_link();
  return check::report();
}

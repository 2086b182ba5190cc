// Which rank reports works that are in flight for long, when, and in which words: polled engines
// under the test's clock.

#include "engine/watchdog.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "cluster.h"

using namespace ringdl;
using ringdl::check::Cluster;

namespace {

constexpr int64_t kAfterNs = 10 * kSecond;

// Lets a time pass, and returns what was said meanwhile.
std::string pass(Cluster& cluster, int64_t time_ns) {
  cluster.said.clear();
  cluster.poll_until([] { return false; }, time_ns, kSecond / 10);
  return cluster.said;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

Call named(const std::string& name) {
  Call call;
  call.kind = Kind::kAllreduce;
  call.dtype = DType::kFloat32;
  call.shape = {1};
  call.name = name;
  return call;
}

// Two of three ranks have submitted it: one of them reports it, and again when it is twice as old.
void test_who_is_awaited() {
  Cluster cluster(3);
  cluster.for_each([](Engine& engine) { engine.parts().watchdog.set_after(kAfterNs, false); });
  std::array<float, 3> data{1, 2, 3};
  std::vector<std::shared_ptr<Work>> works;
  for (const int rank : {1, 2}) {
    works.push_back(cluster[rank].submit(named("late"), &data[static_cast<size_t>(rank)]));
  }
  CHECK_EQ(pass(cluster, kAfterNs - kSecond), "");
  const std::string first = pass(cluster, 4 * kSecond);
  CHECK_EQ(count(first, "allreduce 'late' has been in flight for 1"), 1u);
  CHECK_EQ(count(first, "rank 0 has not arrived"), 1u);
  CHECK_EQ(pass(cluster, 5 * kSecond), "");
  CHECK_EQ(count(pass(cluster, 7 * kSecond), "has been in flight for 2"), 1u);
  works.push_back(cluster[0].submit(named("late"), data.data()));
  CHECK(cluster.finish(works));
  CHECK_EQ(pass(cluster, 60 * kSecond), "");
}

void test_the_oldest_are_told_of() {
  Cluster cluster(2);
  cluster.for_each([](Engine& engine) { engine.parts().watchdog.set_after(kAfterNs, false); });
  std::array<float, 14> data{};
  for (size_t i = 0; i < data.size(); ++i) {
    cluster[0].submit(named("w" + std::to_string(i)), &data[i]);
  }
  const std::string said = pass(cluster, kAfterNs + 3 * kSecond);
  CHECK_EQ(count(said, "has been in flight"), 10u);
  CHECK_EQ(count(said, "'w10'"), 0u);
  CHECK_EQ(count(said, "and 4 later works on rank 0"), 1u);
}

void test_off() {
  Cluster cluster(2);
  float value = 0;
  cluster.for_each([](Engine& engine) { engine.parts().watchdog.set_after(0, false); });
  cluster[0].submit(named("late"), &value);
  CHECK_EQ(pass(cluster, 100 * kSecond), "");
}

// Where all print what they have in flight.
void test_dumps() {
  Cluster cluster(2);
  float value = 0;
  cluster.for_each([](Engine& engine) { engine.parts().watchdog.set_after(kAfterNs, true); });
  cluster[0].submit(named("late"), &value);
  CHECK_EQ(count(pass(cluster, kAfterNs + kSecond), "rank 0: 1 works in flight"), 1u);
}

void test_shutdown() {
  Cluster cluster(2);
  Watchdog& watchdog = cluster[0].parts().watchdog;
  watchdog.set_after(kAfterNs, false);
  CHECK_EQ(watchdog.check_shutdown("rank 1", kSecond), "");
  CHECK_EQ(watchdog.check_shutdown("rank 1", kAfterNs), "");
  CHECK_EQ(watchdog.check_shutdown("rank 1", kSecond + kAfterNs),
           "ringdl: shutdown() has waited 10 s for rank 1\n");
  CHECK_EQ(watchdog.check_shutdown("rank 1", 2 * kAfterNs), "");
  CHECK_EQ(watchdog.check_shutdown("", kSecond + 2 * kAfterNs), "");  // another rank reports it
  CHECK_EQ(watchdog.check_shutdown("rank 1", kSecond + 4 * kAfterNs),
           "ringdl: shutdown() has waited 40 s for rank 1\n");
}

}  // namespace

int main() {
  test_who_is_awaited();
  test_the_oldest_are_told_of();
  test_off();
  test_dumps();
  test_shutdown();
  return check::report();
}

// How a thread spends its time while it waits.

#include "engine/backoff.h"

#include "base/clock.h"
#include "check.h"

using namespace ringdl;

namespace {

int64_t after(std::initializer_list<int64_t> waits, int64_t yields_ns) {
  for (const int64_t waited_ns : waits) yields_ns = yields_after(yields_ns, waited_ns);
  return yields_ns;
}

void test_yields_follow_the_waits() {
  constexpr int64_t kMost = kMillisecond;
  CHECK_EQ(after({1, kMicrosecond, kMillisecond / 2}, kMost), kMost);
  CHECK_EQ(after({kMost, kMost + 1}, kMost), kMost);  // nearly in time: the next may be
  CHECK_EQ(after({4 * kMillisecond}, kMost), kMost / 2);
  int64_t yields_ns = kMost;
  for (int i = 0; i < 20; ++i) yields_ns = yields_after(yields_ns, 4 * kMillisecond);
  CHECK_EQ(yields_ns, 50 * kMicrosecond);
  CHECK_EQ(after({yields_ns / 2}, yields_ns), yields_ns);  // an answer that was yielded for
  CHECK_EQ(after({yields_ns + 1}, yields_ns), 2 * yields_ns);
  for (int i = 0; i < 20; ++i) yields_ns = yields_after(yields_ns, 9 * kMillisecond / 10);
  CHECK(yields_ns > 9 * kMillisecond / 10 && yields_ns <= kMost);
}

void test_a_thread_learns() {
  Backoff backoff(true);
  CHECK_EQ(backoff.yields_ns(), kMillisecond);
  for (int i = 0; i < 8; ++i) {
    const int64_t begin = now_ns();
    while (now_ns() - begin < 3 * kMillisecond) backoff.pause();
    backoff.reset();
    backoff.reset();  // nothing was waited for
  }
  CHECK_EQ(backoff.yields_ns(), 50 * kMicrosecond);
}

}  // namespace

int main() {
  test_yields_follow_the_waits();
  test_a_thread_learns();
  return check::report();
}

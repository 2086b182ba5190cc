// What becomes of a stage in the host's memory when its collective ends early.

#include "collective/device/staged.h"

#include "check.h"
#include "reduce/executor.h"

using namespace ringdl;

namespace {

// In memory that others see if `pieces` is not -1; done at once, or never.
class Pretended final : public Collective {
 public:
  Pretended(int64_t pieces, bool is_done) : pieces_(pieces), is_done_(is_done) {}
  bool step(Channel&) override { return is_done_; }
  int64_t pieces() const override { return pieces_; }
  std::string describe() const override { return "pretended"; }

 private:
  const int64_t pieces_;
  const bool is_done_;
};

class NoChannel final : public Channel {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void send(int, const void*, size_t) override {}
  void receive(int, void*, size_t) override {}
  int64_t sent(int) const override { return 0; }
  int64_t received(int) const override { return 0; }
  bool agreed() const override { return true; }
};

// Whether the stage outlives a collective that was stepped once.
bool is_kept(int64_t pieces, bool is_done) {
  const auto stage = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = stage;
  {
    std::byte here[8] = {};
    std::byte there[8] = {};
    Staged staged([] { return true; }, {cpu_executor(), cpu_executor()},
                  {{{here, there, 8}, {there, here, 8}}}, 1, stage,
                  [=](size_t) { return std::make_unique<Pretended>(pieces, is_done); }, 0, 2);
    NoChannel channel;
    CHECK_EQ(staged.step(channel), is_done);
  }
  return watched.use_count() > 1;
}

// Others of this host may still read it, and write there.
void test_stages_that_others_see() {
  CHECK(is_kept(0, false));
  CHECK(!is_kept(-1, false));
  CHECK(!is_kept(0, true));
  CHECK(!is_kept(-1, true));
}

}  // namespace

int main() {
  test_stages_that_others_see();
  return check::report();
}

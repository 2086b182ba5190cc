// Shards that ranks read and change where they are: passes over their blocks, by hand and by
// threads; clocks.

#include "server/parameter_server.h"

#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "calls.h"
#include "ranks.h"
#include "server/visit.h"

using namespace ringdl;

namespace {

constexpr size_t kBlock = Shard::kBlockBytes / sizeof(float);
constexpr int64_t kTimeout = 60 * kSecond;

// Shards in ordinary memory.
struct Shards {
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<Shard> shards;

  Shards(size_t count, int servers) {
    const size_t shard_count = (count + servers - 1) / servers;
    for (int i = 0; i < servers; ++i) {
      const size_t begin = std::min(count, static_cast<size_t>(i) * shard_count);
      const Shard::Shape shape{DType::kFloat32, begin, std::min(count, begin + shard_count) - begin,
                               Update::Rule::kSgd};
      memory.push_back(std::make_unique<std::byte[]>(Shard::bytes(shape)));
      shards.emplace_back(memory.back().get(), shape);
    }
  }
};

std::vector<Piece> cut(std::vector<float>& array, std::mt19937_64& random) {
  std::vector<Piece> pieces;
  size_t begin = 0;
  while (begin < array.size()) {
    const size_t count = std::min<size_t>(random() % (2 * kBlock), array.size() - begin);
    pieces.push_back({begin, count, reinterpret_cast<std::byte*>(array.data() + begin)});
    begin += count;
  }
  return pieces;
}

// Each element once, and one end per block.
void test_passes_cover_everything() {
  std::mt19937_64 random(1);
  for (const size_t count : {size_t{1}, kBlock, kBlock + 1, 5 * kBlock + 77}) {
    for (const int servers : {1, 2, 3, 7}) {
      Shards its(count, servers);
      std::vector<float> array(count);
      std::iota(array.begin(), array.end(), 0.0f);
      size_t ends = 0;
      std::ranges::rotate(its.shards, its.shards.begin() + random() % servers);
      Visit visit(its.shards, cut(array, random), 0, nullptr,
                  [&](const Shard& shard, size_t begin, std::byte* data, size_t n, bool is_last) {
                    std::memcpy(shard.values(begin), data, n * sizeof(float));
                    ends += is_last;
                  });
      size_t steps = 0;
      while (!visit.is_done()) {
        CHECK(visit.step());
        ++steps;
      }
      size_t blocks = 0;
      size_t at = 0;
      bool is_right = true;
      std::ranges::sort(its.shards, {}, [](const Shard& shard) { return shard.shape().begin; });
      for (const Shard& shard : its.shards) {
        blocks += shard.blocks();
        const auto* const values = reinterpret_cast<const float*>(shard.values(0));
        for (size_t i = 0; i < shard.shape().count; ++i) is_right &= values[i] == array[at++];
      }
      CHECK(is_right);
      CHECK_EQ(at, count);
      CHECK_EQ(steps, blocks);
      CHECK_EQ(ends, blocks);
    }
  }
}

// Of two passes one is first in all blocks of a shard, whatever order they are stepped in; and what
// ends early gives its lock back.
void test_passes_do_not_overtake() {
  std::mt19937_64 random(2);
  const size_t count = 10 * kBlock;
  for (int turn = 0; turn < 200; ++turn) {
    Shards its(count, 2);
    std::vector<float> array(count);
    std::vector<std::vector<int>> orders(10);
    std::vector<std::unique_ptr<Visit>> visits;
    const std::vector<Shard> backwards{its.shards[1], its.shards[0]};
    for (int rank = 0; rank < 3; ++rank) {
      visits.push_back(std::make_unique<Visit>(
          random() % 2 == 0 ? its.shards : backwards, cut(array, random), rank, nullptr,
          [&, rank](const Shard& shard, size_t begin, std::byte*, size_t, bool is_last) {
            if (is_last) orders[(shard.shape().begin + begin) / kBlock].push_back(rank);
          }));
    }
    while (std::ranges::any_of(visits, [](const auto& each) { return !each->is_done(); })) {
      Visit& visit = *visits[random() % 3];
      if (!visit.is_done()) visit.step();
    }
    for (size_t block = 0; block < orders.size(); ++block) {
      CHECK_EQ(orders[block].size(), 3u);
      if (block != 0 && block != 5) CHECK(orders[block] == orders[block - 1]);
    }
  }
  Shards its(count, 1);
  std::vector<float> array(count);
  const auto nothing = [](const Shard&, size_t, std::byte*, size_t, bool) {};
  {
    Visit visit(its.shards, cut(array, random), 1, nullptr, nothing);
    visit.step();
    Visit other(its.shards, cut(array, random), 2, nullptr, nothing);
    CHECK(!other.step());
    CHECK_EQ(other.awaited(), 1);
  }
  CHECK_EQ(its.shards[0].lock(0).holder(), -1);
}

// Where rank 1 has ended.
class WindowOfDead final : public Window {
 public:
  bool reaches(int) const override { return true; }
  bool has_ended(int rank) const override { return rank == 1; }
  std::byte* at(int, uint64_t) const override { return nullptr; }
  std::optional<uint64_t> offset_of(const void*, size_t) const override { return {}; }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  std::shared_ptr<std::byte> allocate_stage(size_t) override { return nullptr; }
  void free_once(std::shared_ptr<std::byte>, const std::atomic<uint64_t>&, uint64_t) override {}
};

// Says that it brings a gradient, and brings none.
class HalfAPush final : public Collective {
 public:
  bool step(Channel& channel) override {
    if (!std::exchange(has_asked_, true)) channel.send(1, &request_, sizeof(request_));
    return false;
  }
  std::string describe() const override { return "half a push"; }

 private:
  const Request request_{.what = Request::What::kPush};
  bool has_asked_ = false;
};

// What others see of a shard that holds all parameters, of two members.
Shard shard_of(const std::shared_ptr<Driver>& driver, int64_t place, size_t count) {
  return {driver->window()->at(0, static_cast<uint64_t>(place)) + Board::kBytes,
          {DType::kFloat32, 0, count, Update::Rule::kSgd}};
}

void test_locks_of_the_dead() {
  BlockLock lock{};
  const WindowOfDead window;
  CHECK(lock.try_take(2, &window));
  CHECK(!lock.try_take(0, &window));
  lock.give_back();
  CHECK(lock.try_take(1, &window));
  CHECK(!lock.try_take(0, nullptr));
  CHECK(lock.try_take(0, &window));
  CHECK_EQ(lock.holder(), 0);

  Shards its(kBlock, 1);
  std::vector<float> array(kBlock);
  std::mt19937_64 random(3);
  CHECK(its.shards[0].lock(0).try_take(1, nullptr));
  Visit visit(its.shards, cut(array, random), 2, &window,
              [](const Shard&, size_t, std::byte*, size_t, bool) {});
  CHECK(!visit.step());
  CHECK_EQ(visit.awaited(), 1);
  CHECK(visit.step(true));
  CHECK(visit.is_done());
}

// Against doubles, also where the counts are odd.
template <class T>
void test_rules(DType dtype, double tolerance) {
  for (const auto rule : {Update::Rule::kSgd, Update::Rule::kAdagrad, Update::Rule::kAdam}) {
    for (const size_t count : {1u, 7u, 64u, 1001u}) {
      std::mt19937_64 random(count);
      std::normal_distribution<double> normal;
      std::vector<T> p(count), g(count);
      std::array<std::vector<T>, 2> states{std::vector<T>(count), std::vector<T>(count)};
      std::vector<double> expected(count), first(count), second(count);
      for (size_t i = 0; i < count; ++i) expected[i] = p[i] = static_cast<T>(normal(random));
      const Update how{rule, 0.1, 0.8, 0.9, 1e-6};
      for (int number = 1; number < 6; ++number) {
        for (size_t i = 0; i < count; ++i) {
          const double x = g[i] = static_cast<T>(normal(random));
          if (rule == Update::Rule::kSgd) {
            expected[i] -= 0.1 * x;
          } else if (rule == Update::Rule::kAdagrad) {
            first[i] += x * x;
            expected[i] -= 0.1 * x / (std::sqrt(first[i]) + 1e-6);
          } else {
            first[i] = 0.8 * first[i] + 0.2 * x;
            second[i] = 0.9 * second[i] + 0.1 * x * x;
            const double root = std::sqrt(second[i] / (1 - std::pow(0.9, number)));
            expected[i] -= 0.1 / (1 - std::pow(0.8, number)) * first[i] / (root + 1e-6);
          }
        }
        update(dtype, how, static_cast<uint64_t>(number), reinterpret_cast<std::byte*>(p.data()),
               {reinterpret_cast<std::byte*>(states[0].data()),
                reinterpret_cast<std::byte*>(states[1].data())},
               reinterpret_cast<const std::byte*>(g.data()), count);
      }
      bool is_near = true;
      for (size_t i = 0; i < count; ++i) is_near &= std::abs(p[i] - expected[i]) < tolerance;
      CHECK(is_near);
    }
  }
}

std::unique_ptr<ParameterServer> make(const std::shared_ptr<Driver>& driver, size_t count,
                                      int servers, const std::vector<Piece>& pieces,
                                      Update::Rule rule = Update::Rule::kSgd) {
  auto server = std::make_unique<ParameterServer>(
      driver, "parameters", driver->group_of_all_ranks(), DType::kFloat32, count, rule, servers);
  std::vector<int64_t> places;
  for (const auto& its : check::exchange(*driver, {server->place()})) places.push_back(its[0]);
  server->connect(places);
  if (driver->rank() < servers) server->fill(pieces, driver->rank(), {kTimeout});
  check::exchange(*driver, {0});
  return server;
}

std::vector<Piece> whole(std::vector<float>& array) {
  return {{0, array.size(), reinterpret_cast<std::byte*>(array.data())}};
}

// Ranks of so many hosts, and the shards.
void run_on(const std::vector<int>& hosts, const check::DriverBody& body) {
  const auto windows = check::connected_windows(hosts, 64 << 20);
  check::run_drivers(static_cast<int>(hosts.size()), {.segment_bytes = 64 << 10}, {},
                     [&](const std::shared_ptr<Driver>& driver) {
                       driver->set_window(windows[static_cast<size_t>(driver->rank())], hosts);
                       body(driver);
                     });
}

// Ranks push and fetch at once: no update is lost, and a fetch sees whole ones.
void test_ranks_at_once() {
  const std::vector<std::vector<int>> layouts{{0, 0, 0}, {0, 0, 1}, {0, 1, 2}, {0, 1, 0, 1}};
  for (const auto& hosts : layouts) {
    for (const int servers : {1, 3}) {
      const size_t count = 3 * kBlock + 1000;
      const auto ranks = static_cast<float>(hosts.size());
      run_on(hosts, [&](const std::shared_ptr<Driver>& driver) {
        std::vector<float> values(count, 1.0f);
        std::vector<float> ones(count, -1.0f);
        const std::vector<Piece> gradient{
            {0, 100, reinterpret_cast<std::byte*>(ones.data())},
            {100, count - 100, reinterpret_cast<std::byte*>(ones.data() + 100)}};
        const auto server = make(driver, count, servers, whole(values));
        const ParameterServer::Patience patience{kTimeout};
        constexpr int kPushes = 20;
        for (int i = 1; i <= kPushes; ++i) {
          server->push(gradient, {Update::Rule::kSgd, 1.0}, patience);
          server->set_clock(static_cast<uint64_t>(i));
          server->wait_for(static_cast<uint64_t>(std::max(i - 2, 0)), patience);
          server->fetch(whole(values), patience);
          for (int member = 0; member < servers; ++member) {
            const auto [begin, end] = server->part(member);
            bool is_whole = true;
            for (size_t at = begin; at < end; ++at) is_whole &= values[at] == values[begin];
            CHECK(is_whole);
            const auto least = static_cast<float>(1 + i);
            const auto others = (ranks - 1) * static_cast<float>(std::max(i - 2, 0));
            CHECK(values[begin] >= least + others);
          }
        }
        check::exchange(*driver, {0});
        server->fetch(whole(values), patience);
        CHECK(std::ranges::all_of(values, [&](float x) { return x == 1 + ranks * kPushes; }));
        check::exchange(*driver, {0});
      });
    }
  }
}

// One after the other, the center moves with each; pieces of odd sizes, of shards elsewhere.
void test_pulls() {
  std::mt19937_64 random(4);
  const size_t count = 2 * kBlock + 77;
  for (const auto& hosts : {std::vector<int>{0, 0}, {0, 1}}) {
    for (const int servers : {1, 2}) {
      run_on(hosts, [&](const std::shared_ptr<Driver>& driver) {
        std::vector<float> values(count, 8.0f);
        const auto server = make(driver, count, servers, whole(values));
        float center = 8;
        std::array<float, 2> own{8, 8};
        std::mt19937_64 same(5);
        for (int turn = 0; turn < 6; ++turn) {
          const int rank = turn % 2;
          own[rank] += static_cast<float>(4 << turn);
          const float moved = (own[rank] - center) / 4;
          own[rank] -= moved;
          center += moved;
          if (driver->rank() == rank) {
            for (float& value : values) value += static_cast<float>(4 << turn);
            server->pull(cut(values, same), 0.25, {kTimeout});
            CHECK(std::ranges::all_of(values, [&](float value) { return value == own[rank]; }));
          }
          check::exchange(*driver, {0});
        }
        server->fetch(cut(values, same), {kTimeout});
        CHECK(std::ranges::all_of(values, [&](float value) { return value == center; }));
        check::exchange(*driver, {0});
      });
    }
  }
}

// Of one member's shard alone, as this rank and the other one reach it.
void test_one_shard() {
  const size_t own = ParameterServer::kMultiple * 1000;
  for (const auto& hosts : {std::vector<int>{0, 0}, {0, 1}}) {
    run_on(hosts, [&](const std::shared_ptr<Driver>& driver) {
      std::vector<float> values(2 * own, 1.0f);
      const auto server = make(driver, 2 * own, 2, whole(values));
      const int other = 1 - driver->rank();
      const auto [begin, end] = server->part(other);
      CHECK_EQ(begin, static_cast<size_t>(other) * own);
      CHECK_EQ(end - begin, own);
      std::vector<float> its(own, static_cast<float>(-1 - other));
      const std::vector<Piece> pieces{{begin, own, reinterpret_cast<std::byte*>(its.data())}};
      const ParameterServer::Patience patience{kTimeout};
      server->push(pieces, {Update::Rule::kSgd, 1.0}, patience, other);  // its: 2 or 3
      std::ranges::fill(its, static_cast<float>(4 + other));
      server->pull(pieces, 0.5, patience, other);
      CHECK(std::ranges::all_of(its, [&](float x) { return x == static_cast<float>(3 + other); }));
      check::exchange(*driver, {0});
      server->fetch(pieces, patience, other);
      CHECK(std::ranges::all_of(its, [&](float x) { return x == static_cast<float>(3 + other); }));
      server->fetch(whole(values), patience);
      for (size_t at = 0; at < values.size(); ++at) CHECK_EQ(values[at], at < own ? 3.0f : 4.0f);
      check::exchange(*driver, {0});
    });
  }
}

// What other hosts are asked for leaves nothing behind: its submitter holds no arrays for it.
void test_calls_of_other_hosts_are_not_named() {
  run_on({0, 1}, [&](const std::shared_ptr<Driver>& driver) {
    std::vector<float> values(300, 1.0f);
    const auto server = make(driver, values.size(), 2, whole(values));
    driver->take_ended();
    for (int i = 0; i < 5; ++i) server->fetch(whole(values), {kTimeout});
    CHECK(driver->take_ended().empty());
    check::exchange(*driver, {0});
  });
}

// Another size of segments is for what is made from now on.
void test_segments_change() {
  run_on({0, 1}, [&](const std::shared_ptr<Driver>& driver) {
    std::vector<float> values(500'000, 1.0f);
    const auto server = make(driver, values.size(), 2, whole(values));
    driver->set_segment_bytes(1 << 20);
    check::exchange(*driver, {0});
    std::vector<float> gradient(values.size(), 1.0f);
    server->push(whole(gradient), {Update::Rule::kSgd, 1.0}, {kTimeout});
    check::exchange(*driver, {0});
    server->fetch(whole(values), {kTimeout});
    CHECK(std::ranges::all_of(values, [](float value) { return value == -1.0f; }));
    check::exchange(*driver, {0});
  });
}

// Who is awaited for too long is named.
void test_patience() {
  for (const auto& hosts : {std::vector<int>{0, 0}, {0, 1}}) {
    run_on(hosts, [&](const std::shared_ptr<Driver>& driver) {
      std::vector<float> values(10);
      const auto server = make(driver, 10, 1, whole(values));
      if (driver->rank() == 1) {
        int asked = 0;
        const ParameterServer::Patience patience{350 * kMillisecond, [&] { ++asked; }};
        CHECK_THROWS(server->wait_for(3, patience), StallError, "rank 0 has pushed 0 steps");
        CHECK(asked >= 2);
      }
      check::exchange(*driver, {0});
      server->set_clock(ParameterServer::kEnded);
      server->flush_clock({kTimeout});
      server->wait_for(1'000'000, {kTimeout});
      check::exchange(*driver, {0});
    });
  }
}

// While a call has the stage and brings nothing, others wait; they are told who is slow.
void test_a_caller_that_stops() {
  const std::vector<int> hosts{0, 1, 2};
  run_on(hosts, [&](const std::shared_ptr<Driver>& driver) {
    std::vector<float> values(kBlock, 1.0f);
    const auto server = make(driver, values.size(), 1, whole(values));
    check::exchange(*driver, {0});
    const BoxName box{"parameters", driver->group_of_all_ranks()};
    std::shared_ptr<Work> half;
    if (driver->rank() == 1) half = driver->call_box(box, 0, std::make_unique<HalfAPush>());
    check::exchange(*driver, {0});
    if (driver->rank() == 2) {
      CHECK_THROWS(server->fetch(whole(values), {300 * kMillisecond}), StallError,
                   "rank 0, which has a shard of the parameters, has not answered for 0.3 s");
    }
    check::exchange(*driver, {0});
    if (half) driver->give_up(half, "the test says so");
    server->fetch(whole(values), {kTimeout});
    CHECK(std::ranges::all_of(values, [](float value) { return value == 1; }));
    check::exchange(*driver, {0});
  });
}

// Memory and the box go once all have left, whoever leaves first.
void test_leaving() {
  run_on({0, 1, 0}, [&](const std::shared_ptr<Driver>& driver) {
    std::vector<float> values(kBlock, 1.0f);
    auto server = make(driver, values.size(), 1, whole(values));
    check::exchange(*driver, {0});
    if (driver->rank() == 0) server.reset();
    check::exchange(*driver, {0});
    if (server) server->fetch(whole(values), {kTimeout});
    check::exchange(*driver, {0});
    server.reset();
    check::exchange(*driver, {0});
    check::until([&] {
      driver->help();
      return driver->stats().at("open_boxes") == 0;
    });
    CHECK(driver->stats().at("open_boxes") == 0);
    check::exchange(*driver, {0});
  });
}

// A rank that holds a block for too long is named; what ends waiting gives its locks back.
void test_a_block_that_is_held() {
  const size_t count = 3 * kBlock;
  const auto windows = check::connected_windows(2, 64 << 20);
  check::run_drivers(2, {}, {}, [&](const std::shared_ptr<Driver>& driver) {
    driver->set_window(windows[static_cast<size_t>(driver->rank())], {0, 0});
    std::vector<float> values(count);
    const std::vector<Piece> all{{0, count, reinterpret_cast<std::byte*>(values.data())}};
    const auto server = make(driver, count, 1, all);
    const int64_t place = check::exchange(*driver, {server->place()})[0][0];
    const Shard shard = shard_of(driver, place, count);
    if (driver->rank() == 0) CHECK(shard.lock(1).try_take(0, nullptr));
    check::exchange(*driver, {0});
    if (driver->rank() == 1) {
      CHECK_THROWS(server->fetch(all, {50 * kMillisecond}), StallError,
                   "rank 0 has held a block of the parameters");
      CHECK_EQ(shard.lock(0).holder(), -1);
    }
    check::exchange(*driver, {0});
    if (driver->rank() == 0) shard.lock(1).give_back();
    check::exchange(*driver, {0});
    server->fetch(all, {kTimeout});
    check::exchange(*driver, {0});
  });
}

// It stays while another rank uses it, and though a forked child has dropped it.
void test_memory_of_a_shard() {
  const size_t count = 20 << 20;  // beyond what is kept for the next arrays
  const auto windows = check::connected_windows(2, 512 << 20);
  check::run_drivers(2, {}, {}, [&](const std::shared_ptr<Driver>& driver) {
    driver->set_window(windows[static_cast<size_t>(driver->rank())], {0, 0});
    std::vector<float> values(count, 3.0f);
    const std::vector<Piece> all{{0, count, reinterpret_cast<std::byte*>(values.data())}};
    auto server = make(driver, count, 1, all);
    const int64_t place = check::exchange(*driver, {server->place()})[0][0];
    if (driver->rank() == 0) {
      server.reset();
      auto other = windows[0]->allocate(count * sizeof(float));
      CHECK(static_cast<int64_t>(*windows[0]->offset_of(other.get(), 1)) != place);
    }
    check::exchange(*driver, {0});
    if (driver->rank() == 1) {
      std::ranges::fill(values, 0.0f);
      server->fetch(all, {kTimeout});
      CHECK(std::ranges::all_of(values, [](float value) { return value == 3.0f; }));
      CHECK_EQ(Board(windows[1]->at(0, static_cast<uint64_t>(place))).left().load(), 1u);
      server.reset();
      CHECK_EQ(Board(windows[1]->at(0, static_cast<uint64_t>(place))).left().load(), 2u);
    }
    check::exchange(*driver, {0});
  });
}

void test_wrong_use() {
  check::run_drivers(2, {}, {}, [&](const std::shared_ptr<Driver>& driver) {
    const SharedGroup& all = driver->group_of_all_ranks();
    CHECK_THROWS(ParameterServer(driver, "its", all, DType::kInt32, 1, Update::Rule::kSgd, 1),
                 UsageError, "holds float32 or float64, not int32");
  });
}

}  // namespace

int main() {
  test_passes_cover_everything();
  test_passes_do_not_overtake();
  test_locks_of_the_dead();
  test_rules<float>(DType::kFloat32, 1e-4);
  test_rules<double>(DType::kFloat64, 1e-12);
  test_ranks_at_once();
  test_pulls();
  test_one_shard();
  test_calls_of_other_hosts_are_not_named();
  test_segments_change();
  test_patience();
  test_a_caller_that_stops();
  test_leaving();
  test_a_block_that_is_held();
  test_memory_of_a_shard();
  test_wrong_use();
  return check::report();
}

// Messages over sockets: order, matching, withdrawals, large messages, and ranks that end.

#include "transport/tcp/tcp.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "calls.h"
#include "child.h"
#include "ranks.h"
#include "sockets.h"
#include "transport/tcp/connection.h"

using namespace ringdl;
using namespace ringdl::check;

namespace {

using Bytes = std::vector<std::byte>;
using Transports = std::vector<std::unique_ptr<Transport>>;

constexpr size_t kWhole = tcp::Connection::kWholeBytes;

// Sizes around those at which the handling changes, and more than sockets take at once.
constexpr size_t kSizes[] = {0, 1, kWhole - 1, kWhole, kWhole + 1, 16 << 10, 100 << 10, 20 << 20};

struct Ends final : public Completion {
  std::vector<Ticket> tickets;
  void ended(Ticket ticket) override { tickets.push_back(ticket); }
  bool has(Ticket ticket) const {
    return std::find(tickets.begin(), tickets.end(), ticket) != tickets.end();
  }
};

Bytes message_of(size_t bytes, unsigned seed) {
  Bytes message(bytes);
  unsigned next = seed;
  for (std::byte& each : message) each = static_cast<std::byte>((next = next * 1664525 + 1) >> 24);
  return message;
}

// Polls all ranks in turn until the condition holds, or for half a minute: sanitizers are slow.
template <class Condition>
bool look_until(const Transports& transports, const Condition& condition) {
  const int64_t deadline = now_ns() + 30 * kSecond;
  while (!condition() && now_ns() < deadline) {
    for (const auto& transport : transports) {
      if (transport) transport->poll();
    }
  }
  return condition();
}

// The destructors of both ends wait for each other, as their ranks do.
void close_all(Transports& transports) {
  std::vector<std::thread> threads;
  for (auto& transport : transports) threads.emplace_back([&transport] { transport.reset(); });
  for (std::thread& thread : threads) thread.join();
}

void every_length(bool posted_before) {
  Transports ranks = make_tcp(2);
  Ends ends;
  std::vector<Bytes> sent, received;
  std::vector<Ticket> receives;
  for (const size_t bytes : kSizes) {
    sent.push_back(message_of(bytes, static_cast<unsigned>(bytes)));
    received.emplace_back(bytes + 1);
  }
  const auto receive = [&] {
    for (Bytes& into : received) {
      receives.push_back(ranks[1]->receive(0, 7, into.data(), into.size(), ends));
    }
  };
  Ends sends;
  if (posted_before) receive();
  for (const Bytes& each : sent) ranks[0]->send(1, 7, each.data(), each.size(), sends);
  if (!posted_before) {  // they are read whether they are expected or not
    CHECK(look_until(ranks, [&] { return sends.tickets.size() == sent.size(); }));
    receive();
  }
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == sent.size(); }));
  CHECK(ends.tickets == receives);
  for (size_t i = 0; i < sent.size(); ++i) {
    received[i].resize(sent[i].size());
    CHECK(received[i] == sent[i]);
  }
  close_all(ranks);
}

// More both ways at once than a socket holds, and nobody receives it before all is sent.
void large_both_ways() {
  Transports ranks = make_tcp(2);
  Ends ends;
  std::array<Bytes, 2> out{message_of(24 << 20, 1), message_of(24 << 20, 2)};
  std::array<Bytes, 2> in{Bytes(24 << 20), Bytes(24 << 20)};
  for (const int rank : {0, 1}) {
    ranks[rank]->send(1 - rank, 3, out[rank].data(), out[rank].size(), ends);
  }
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == 2; }));
  for (const int rank : {0, 1}) {
    ranks[rank]->receive(1 - rank, 3, in[rank].data(), in[rank].size(), ends);
  }
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == 4; }));
  CHECK(in[0] == out[1] && in[1] == out[0]);
  close_all(ranks);
}

// Messages of one sender with one tag keep their order, also among other tags and senders, and when
// only some receives are posted before.
void order_per_sender_and_tag() {
  constexpr int kRanks = 4, kTags = 3, kMessages = 200;
  Transports ranks = make_tcp(kRanks);
  std::mt19937 random(5);
  Ends sends, ends;
  std::map<std::pair<int, int>, std::vector<std::pair<Bytes, Bytes>>> streams;  // sent, received
  for (int from = 1; from < kRanks; ++from) {
    for (int tag = 0; tag < kTags; ++tag) {
      for (int i = 0; i < kMessages; ++i) {
        const size_t bytes = random() % (i % 10 == 0 ? 3 * kWhole : 100);
        streams[{from, tag}].push_back({message_of(bytes, random()), Bytes(bytes)});
      }
    }
  }
  std::map<std::pair<int, int>, size_t> next_send, next_receive;
  constexpr size_t kAll = (kRanks - 1) * kTags * kMessages;
  size_t sent = 0, posted = 0;
  while (sent < kAll || posted < kAll) {
    const int from = 1 + static_cast<int>(random() % (kRanks - 1));
    const int tag = static_cast<int>(random() % kTags);
    auto& stream = streams[{from, tag}];
    if (size_t& i = next_send[{from, tag}]; random() % 2 == 0 && i < stream.size()) {
      ranks[from]->send(0, tag, stream[i].first.data(), stream[i].first.size(), sends);
      ++i, ++sent;
    }
    if (size_t& i = next_receive[{from, tag}]; random() % 2 == 0 && i < stream.size()) {
      ranks[0]->receive(from, tag, stream[i].second.data(), stream[i].second.size(), ends);
      ++i, ++posted;
    }
    if (random() % 8 == 0) ranks[random() % kRanks]->poll();
  }
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == kAll; }));
  for (const auto& [source, stream] : streams) {
    for (const auto& [out, in] : stream) CHECK(out == in);
  }
  close_all(ranks);
}

void from_any_rank() {
  Transports ranks = make_tcp(3);
  Ends sends, ends;
  const std::array<int, 3> numbers{0, 1, 2};
  std::array<int, 4> heard{};
  for (int i : {0, 1}) ranks[0]->receive(Transport::kAnyRank, 0, &heard[i], sizeof(int), ends);
  for (const int from : {1, 2}) ranks[from]->send(0, 0, &numbers[from], sizeof(int), sends);
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == 2; }));
  CHECK_EQ(heard[0] + heard[1], 3);
  // Of another tag, of this rank itself, and arrived before their receives.
  ranks[1]->send(0, 1, &numbers[1], sizeof(int), sends);
  ranks[0]->send(0, 0, &numbers[0], sizeof(int), sends);
  ranks[2]->send(0, 0, &numbers[2], sizeof(int), sends);
  CHECK(look_until(ranks, [&] { return sends.tickets.size() == 5; }));
  heard = {-1, -1, -1, -1};
  for (int i : {0, 1}) ranks[0]->receive(Transport::kAnyRank, 0, &heard[i], sizeof(int), ends);
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == 4; }));
  CHECK_EQ(heard[0] + heard[1], 2);
  close_all(ranks);
}

void withdrawn() {
  Transports ranks = make_tcp(2);
  Ends sends, ends;
  int number = 17, heard = 0;
  const Ticket free = ranks[0]->receive(1, 4, &heard, sizeof(int), ends);
  CHECK(ranks[0]->withdraw(free));
  ranks[1]->send(0, 4, &number, sizeof(int), sends);
  for (int i = 0; i < 100; ++i) ranks[0]->poll();
  CHECK(ends.tickets.empty() && heard == 0);
  const Ticket next = ranks[0]->receive(1, 4, &heard, sizeof(int), ends);  // it has arrived
  CHECK(!ranks[0]->withdraw(next));
  CHECK_EQ(heard, 17);
  CHECK(ranks[0]->poll() == 0);

  // A large message of which a part has arrived: its receive's buffer is released at once, and the
  // next message goes where it belongs.
  for (const bool posted_before : {true, false}) {
    const Bytes large = message_of(40 << 20, 3), after = message_of(9 << 10, 4);
    Bytes into(large.size()), into_after(after.size());
    Ticket begun = 0;
    if (posted_before) begun = ranks[0]->receive(1, 5, into.data(), into.size(), ends);
    const size_t sent_before = sends.tickets.size();
    ranks[1]->send(0, 5, large.data(), large.size(), sends);
    ranks[1]->send(0, 5, after.data(), after.size(), sends);
    ranks[0]->poll();
    if (!posted_before) begun = ranks[0]->receive(1, 5, into.data(), into.size(), ends);
    CHECK(sends.tickets.size() == sent_before);
    CHECK(!ranks[0]->withdraw(begun));
    const Bytes as_it_was = into;
    const size_t ended_before = ends.tickets.size();
    ranks[0]->receive(1, 5, into_after.data(), into_after.size(), ends);
    CHECK(look_until(ranks, [&] { return ends.tickets.size() > ended_before; }));
    CHECK(into == as_it_was);
    CHECK(into_after == after);
  }
  close_all(ranks);
}

void too_long(size_t bytes, bool posted_before) {
  Transports ranks = make_tcp(2);
  Ends ends;
  const Bytes out(bytes);
  Bytes in(bytes - 1);
  const auto act = [&] {
    if (posted_before) ranks[0]->receive(1, 0, in.data(), in.size(), ends);
    ranks[1]->send(0, 0, out.data(), out.size(), ends);
    const int64_t deadline = now_ns() + 30 * kSecond;
    while (now_ns() < deadline) {
      ranks[0]->poll();
      if (!posted_before) ranks[0]->receive(1, 0, in.data(), in.size(), ends);
    }
  };
  CHECK_THROWS(act(), Error, "longer than its receive");
  close_all(ranks);
}

// What a rank has sent before it ended is received before it counts as lost; what is sent to it
// then ends, and what is expected from it does not.
void lost_after_its_last_words() {
  Transports ranks = make_tcp(3);
  Ends sends, ends;
  const Bytes words = message_of(3 << 20, 9), answer(30 << 20);
  Bytes heard(words.size());
  std::thread last_words([&] {
    ranks[1]->send(0, 2, words.data(), words.size(), sends);
    while (sends.tickets.empty()) ranks[1]->poll();
    ranks[1].reset();  // waits for the others to notice
  });
  Ends answers;
  ranks[0]->send(1, 2, answer.data(), answer.size(), answers);
  int number = 0;
  const Ticket in_vain = ranks[0]->receive(1, 3, &number, sizeof(int), ends);
  const Ticket known = ranks[0]->receive(1, 2, heard.data(), heard.size(), ends);
  const int64_t deadline = now_ns() + 30 * kSecond;
  while (ranks[0]->lost().empty() && now_ns() < deadline) {
    ranks[0]->poll();
    CHECK(ranks[0]->lost().empty() || ends.has(known));
    ranks[2]->poll();
  }
  last_words.join();
  CHECK(ranks[0]->lost().size() == 1 && ranks[0]->lost()[0].rank == 1);
  CHECK(heard == words);
  ranks[0]->send(1, 2, answer.data(), answer.size(), answers);
  ranks[0]->poll();
  CHECK_EQ(answers.tickets.size(), 2u);
  CHECK(!ends.has(in_vain));
  ranks[0]->withdraw(in_vain);
  ranks[0]->send(2, 0, &number, sizeof(int), answers);  // the others are there
  ranks[2]->receive(0, 0, &number, sizeof(int), ends);
  CHECK(look_until(ranks, [&] { return ends.tickets.size() == 2; }));
  close_all(ranks);
}

// A child that is just being forked has a copy of a socket: it is still reported once it is closed.
void lost_while_a_child_has_its_socket() {
  auto sockets = connected_sockets(2);
  const int copy = dup(sockets[0][1]);
  auto zero = make_tcp_transport(0, std::move(sockets[0]));
  auto one = make_tcp_transport(1, std::move(sockets[1]));
  std::thread leaving([&] { one.reset(); });
  const int64_t deadline = now_ns() + 10 * kSecond;
  while (zero->lost().empty() && now_ns() < deadline) zero->poll();
  CHECK_EQ(zero->lost().size(), 1u);
  for (int i = 0; i < 10; ++i) zero->poll();
  CHECK_EQ(zero->lost().size(), 1u);
  close(copy);
  leaving.join();
}

// A rank that is killed is named by all others at once, though a child that it has forked lives on.
void killed() {
  constexpr int kRanks = 4, kVictim = 2;
  auto sockets = connected_sockets(kRanks);
  std::fflush(nullptr);
  const pid_t victim = fork();
  const auto keep_only = [&](auto is_own) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (is_own(rank)) continue;
      for (const int socket : sockets[static_cast<size_t>(rank)]) {
        if (socket >= 0) close(socket);
      }
    }
  };
  if (victim == 0) {
    keep_only([](int rank) { return rank == kVictim; });
    const Shared driver = make_driver(make_tcp_transport(kVictim, sockets[kVictim]), {});
    barrier(*driver);
    const pid_t child = fork();
    if (child == 0) {
      alarm(3);
      for (;;) pause();
    }
    barrier(*driver);
    pause_ms(300);  // until the barrier has ended everywhere
    raise(SIGKILL);
  }
  keep_only([](int rank) { return rank != kVictim; });
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    threads.emplace_back([rank, own = sockets[static_cast<size_t>(rank)]] {
      const Shared driver = make_driver(make_tcp_transport(rank, own), {});
      barrier(*driver);
      barrier(*driver);
      const int64_t begin = now_ns();
      std::vector<float> data(100000, 1.0f);
      CHECK_THROWS(driver->wait(driver->submit(sum_of(100000, "x"), data.data()), kTimeout),
                   RankFailedError, "rank 2 has ended without shutdown()");
      CHECK(now_ns() - begin < 3 * kSecond);
      const int64_t later = now_ns();
      CHECK_THROWS(barrier(*driver), RankFailedError, "rank 2");
      CHECK(now_ns() - later < kSecond / 10);
      Call among_the_others = sum_of(100000, "x");
      among_the_others.group = group_of({0, 1, 3}, rank, kRanks, 0);
      std::ranges::fill(data, 1.0f);
      driver->wait(driver->submit(among_the_others, data.data()), kTimeout);
      CHECK(std::ranges::all_of(data, [](float value) { return value == 3.0f; }));
      CHECK_THROWS(driver->shutdown(), RankFailedError, "rank 2");
      driver->abandon();
      CHECK_THROWS(barrier(*driver), UsageError, "shut down");
    });
  }
  for (std::thread& thread : threads) thread.join();
  int status = 0;
  CHECK(waitpid(victim, &status, 0) == victim && WIFSIGNALED(status));
}

// Ranks that shut down at other times do not take one another for lost.
void left_one_by_one() {
  auto transports = make_tcp(4);
  std::vector<std::thread> threads;
  for (auto& transport : transports) {
    threads.emplace_back([&transport] {
      const Shared driver = make_driver(std::move(transport), {});
      for (int i = 0; i < 20; ++i) barrier(*driver);
      pause_ms(50 * driver->rank());
      try {
        driver->shutdown();
        CHECK(driver->is_shut_down());
      } catch (const Error& error) {
        record(false, __FILE__, __LINE__, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  in_child("killed", 100, killed);
  in_child("lost_while_a_child_has_its_socket", 20, lost_while_a_child_has_its_socket);
  every_length(true);
  every_length(false);
  large_both_ways();
  order_per_sender_and_tag();
  from_any_rank();
  withdrawn();
  for (const size_t bytes : {size_t{5}, 2 * kWhole}) {
    too_long(bytes, true);
    too_long(bytes, false);
  }
  lost_after_its_last_words();
  for (int i = 0; i < 20; ++i) left_one_by_one();
  return report();
}

// The messages of one work to and from another rank: polled ends over the loopback transport.

#include "engine/channels.h"

#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/wire.h"
#include "transport/loopback/loopback.h"

using namespace ringdl;
using Bytes = std::vector<std::byte>;

namespace {

constexpr uint32_t kInlineBytes = 1000;
constexpr Key kKey{KeySpace::kName, 7, 0};

Bytes noise(size_t bytes, int seed) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<std::byte>(i * 31 + static_cast<size_t>(seed) * 7 + i / 256);
  }
  return data;
}

Description description() {
  Description its;
  its.inline_bytes = kInlineBytes;
  return its;
}

/// One rank's end of a work between two, and what the engine does around it.
class End {
 public:
  explicit End(std::unique_ptr<Transport> its)
      : transport(std::move(its)),
        other_(1 - transport->rank()),
        control_(*transport, [this](const ControlMessage& message) { handle(message); }),
        tags_(TagLayout(transport->max_tag()).pooled),
        channel({*transport, control_, tags_, counters, group_of_all(transport->rank(), 2)}, kKey,
                description(), [this] { ++touched; }) {}
  ~End() { control_.close(); }

  void poll() { transport->poll(); }
  int64_t sent() { return channel.sent(other_); }
  int64_t received() { return channel.received(other_); }

  std::unique_ptr<Transport> transport;
  bool accepts = true;  // what arrives; else it is put off
  int touched = 0;
  EngineCounters counters;

  void accept() {
    accepts = true;
    for (const auto& [message, payload] : std::exchange(put_off_, {})) {
      ControlMessage again = message;
      again.payload = payload.data();
      handle(again);
    }
  }

 private:
  void handle(const ControlMessage& message) {
    const MessageHead& head = message.head;
    if (!accepts) {
      put_off_.push_back({message, {message.payload, message.payload + head.payload_bytes}});
      return;
    }
    if (head.type == MessageType::kSubmit) {
      channel.agree(message.from, message.description);
      if (head.flag != 0) channel.deliver(message.from, 0, message.payload, head.payload_bytes);
    } else if (head.type == MessageType::kData) {
      channel.deliver(message.from, head.sequence, message.payload, head.payload_bytes);
    } else if (head.type == MessageType::kGrant) {
      channel.grant(message.from, head.tag);
    } else if (head.type == MessageType::kClose) {
      channel.close(message.from, head.sequence, head.value);
    }
  }

  const int other_;
  ControlPlane control_;
  TagPools tags_;
  std::vector<std::pair<ControlMessage, Bytes>> put_off_;

 public:
  KeyedChannel channel;  // destroyed before what it uses
};

struct Pair {
  Pair() {
    for (auto& transport : make_loopback(2))
      ends.push_back(std::make_unique<End>(std::move(transport)));
  }
  End& operator[](size_t rank) { return *ends[rank]; }
  void poll() {
    for (int i = 0; i < 50; ++i) {
      for (const auto& end : ends) end->poll();
    }
  }
  std::vector<std::unique_ptr<End>> ends;
};

const std::vector<size_t> kSizes = {0, 10, kInlineBytes, kInlineBytes + 1, 100'000, 5, 300'000};

// Messages both ways, of which some wait for a grant: in order, each once.
void test_order(bool posts_first) {
  Pair pair;
  std::vector<std::vector<Bytes>> outgoing(2);
  std::vector<std::vector<Bytes>> incoming(2);
  const auto post = [&](int rank) {
    for (const size_t bytes : kSizes) {
      Bytes& room = incoming[static_cast<size_t>(rank)].emplace_back(bytes);
      pair[static_cast<size_t>(rank)].channel.receive(1 - rank, room.data(), bytes);
    }
  };
  const auto send = [&](int rank) {
    for (size_t i = 0; i < kSizes.size(); ++i) {
      Bytes& data = outgoing[static_cast<size_t>(rank)].emplace_back(
          noise(kSizes[i], rank * 100 + static_cast<int>(i)));
      pair[static_cast<size_t>(rank)].channel.send(1 - rank, data.data(), data.size());
    }
    pair[static_cast<size_t>(rank)].channel.announce(true);
  };
  for (auto& one : outgoing) one.reserve(kSizes.size());
  for (auto& one : incoming) one.reserve(kSizes.size());
  for (const int rank : {0, 1}) {
    if (posts_first) post(rank);
    send(rank);
  }
  pair.poll();
  for (const int rank : {0, 1}) {
    if (!posts_first) post(rank);
  }
  pair.poll();
  const auto all = static_cast<int64_t>(kSizes.size());
  for (const size_t rank : {0u, 1u}) {
    CHECK_EQ(pair[rank].sent(), all);
    CHECK_EQ(pair[rank].received(), all);
    CHECK(pair[rank].channel.agreed() && pair[rank].channel.idle());
    CHECK(incoming[rank] == outgoing[1 - rank]);
    CHECK_EQ(pair[rank].counters.grants_sent, 1);
    CHECK_EQ(pair[rank].counters.data_messages_sent, 3);
    CHECK(pair[rank].touched > 0);
    pair[rank].channel.finish();
  }
}

// Nothing is taken from a rank before its header agrees.
void test_header_comes_first() {
  Pair pair;
  const Bytes data = noise(100, 1);
  Bytes room(100);
  pair[1].accepts = false;
  pair[1].channel.receive(0, room.data(), room.size());
  pair[0].channel.send(1, data.data(), data.size());
  CHECK_EQ(pair[0].sent(), 0);  // it waits to be sent with the header
  pair[0].channel.announce(true);
  CHECK_EQ(pair[0].sent(), 1);
  pair.poll();
  CHECK(pair[1].received() == 0 && !pair[1].channel.agreed());
  pair[1].accept();
  CHECK(pair[1].received() == 1 && pair[1].channel.agreed());
  CHECK(room == data);
}

// A header that has nothing to wait for is sent alone.
void test_header_alone() {
  Pair pair;
  pair[0].channel.announce(false);
  pair.poll();
  CHECK(pair[1].channel.agreed());
  CHECK(!pair[0].channel.agreed());
}

// An end that gives up keeps the tags on which messages may arrive, and reports what it sent.
void test_abort() {
  Pair pair;
  const Bytes data = noise(100'000, 1);
  Bytes room(data.size());
  pair[1].channel.receive(0, room.data(), room.size());
  pair[0].channel.send(1, data.data(), data.size());
  pair[0].channel.announce(true);
  pair[1].poll();  // has the header, and grants
  const auto open = pair[1].channel.abort();
  CHECK_EQ(open.size(), 1u);
  CHECK(open[0].from == 0 && open[0].received == 0 && open[0].sent == -1);
  CHECK(room == Bytes(room.size()));
  pair[0].poll();  // has the grant, and sends
  CHECK(!pair[0].channel.idle());
  CHECK_EQ(pair[0].channel.abort().size(), 0u);
  CHECK(!pair[0].channel.idle());  // a send is drained, never cancelled
}

}  // namespace

int main() {
  test_order(true);
  test_order(false);
  test_header_comes_first();
  test_header_alone();
  test_abort();
  return check::report();
}

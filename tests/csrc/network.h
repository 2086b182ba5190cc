#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "collective/collective.h"
#include "pretended_device.h"

/// Ranks as objects of one thread: a Channel per rank, and a scheduler that moves one message or
/// steps one rank at a time, in an order drawn from a seed.
namespace ringdl::check {

using Bytes = std::vector<std::byte>;
using Parts = std::vector<std::unique_ptr<Collective>>;

// That may be in flight on one edge.
constexpr int64_t kReceives = 4;
constexpr int64_t kSends = 8;

inline Bytes noise(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline int64_t segments(int64_t bytes, size_t segment_bytes) {
  const auto segment = static_cast<int64_t>(segment_bytes);
  return (bytes + segment - 1) / segment;
}

/// Checks what Channel's contract asks of a collective: both ends name the same sizes; what was
/// handed over is not touched, and not handed over twice, before it has ended.
///
/// It steps a rank again only after one of its messages or operations has ended, unless the rank
/// works in memory that others write to. Sends may end before they are received, or only then, as
/// the seed decides. Nothing is taken from an edge whose two ends do not have the same header.
class Network {
 public:
  Network(int size, uint64_t seed)
      : headers(static_cast<size_t>(size), 0),
        traffic(static_cast<size_t>(size)),
        size_(size),
        seed_(seed),
        random_(seed),
        eager_(static_cast<Eager>(seed % 3)),
        edges_(static_cast<size_t>(size * size)) {
    for (int rank = 0; rank < size; ++rank) {
      channels_.push_back(std::make_unique<End>(*this, rank));
      devices_.push_back(std::make_unique<PretendedDevice>(seed));
      devices_.back()->polls_itself = false;
    }
  }

  /// The executor of a rank: with every other seed a device, which carries operations out later.
  Executor& executor(int rank) {
    if (seed_ % 2 == 0) return cpu_executor();
    return *devices_[static_cast<size_t>(rank)];
  }

  struct Traffic {
    int64_t messages = 0;
    int64_t bytes = 0;
  };

  std::vector<int> headers;      // what each rank means; differing ones disagree
  std::vector<Traffic> traffic;  // sent by each rank
  int64_t most_sends = 0;        // that were in flight on one edge at once
  int64_t most_receives = 0;

  /// Runs one collective; element r is rank r's part. False if it stops before all are done.
  bool run(const Parts& parts) {
    touched_.assign(parts.size(), true);
    std::vector<bool> done(parts.size(), false);
    for (int64_t turn = 0; turn < kMostTurns; ++turn) {
      std::vector<int> steps;
      for (int rank = 0; rank < size_; ++rank) {
        const bool is_polled = !done[rank] && parts[rank]->pieces() >= 0;
        if ((touched_[rank] || is_polled) && !done[rank]) steps.push_back(rank);
      }
      const std::vector<Event> events = possible_events();
      if (steps.empty() && events.empty()) break;
      if (events.empty() || (!steps.empty() && random_() % 2 == 0)) {
        const int rank = steps[random_() % steps.size()];
        touched_[rank] = false;
        if (!parts[rank]->step(*channels_[rank])) continue;
        done[rank] = true;
        finished.push_back(rank);
        demand(open_messages(rank) == 0, "a rank was done before its messages had ended");
        demand(devices_[rank]->is_idle(), "a rank was done before its operations were");
      } else {
        happen(events[random_() % events.size()]);
      }
    }
    return std::all_of(done.begin(), done.end(), [](bool it) { return it; });
  }

  std::vector<int> finished;  // ranks, in this order

 private:
  static constexpr int64_t kMostTurns = 2'000'000;  // of a run that never ends

  enum class Eager { kNever, kAlways, kSometimes };

  struct Message {
    const std::byte* source = nullptr;
    size_t sent_bytes = 0;
    std::vector<std::byte> payload;  // the source when it was sent
    bool sent = false;
    bool eager = false;  // may end before it is received
    bool send_ended = false;
    std::byte* target = nullptr;
    size_t posted_bytes = 0;
    std::vector<std::byte> rubbish;  // what the target holds until the message arrives
    bool posted = false;
    bool arrived = false;
  };

  struct Edge {
    std::vector<Message> messages;
    size_t sends = 0;
    size_t receives = 0;
    size_t sends_ended = 0;  // counted in order
    size_t arrived = 0;
  };

  struct Event {
    int from;
    int to;
    size_t number;
    bool arrives;  // else the send ends; or, if it is from no rank, `to` carries something out
  };

  class End final : public Channel {
   public:
    End(Network& network, int rank) : network_(network), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return network_.size_; }
    void send(int to, const void* data, size_t bytes) override {
      network_.send(rank_, to, static_cast<const std::byte*>(data), bytes);
    }
    void receive(int from, void* data, size_t bytes) override {
      network_.receive(from, rank_, static_cast<std::byte*>(data), bytes);
    }
    int64_t sent(int to) const override {
      return static_cast<int64_t>(network_.edge(rank_, to).sends_ended);
    }
    int64_t received(int from) const override {
      return static_cast<int64_t>(network_.edge(from, rank_).arrived);
    }
    bool agreed() const override { return network_.agree((rank_ + size() - 1) % size(), rank_); }

   private:
    Network& network_;
    int rank_;
  };

  static void demand(bool holds, const char* else_what) {
    if (!holds) record(false, __FILE__, __LINE__, else_what);
  }

  Edge& edge(int from, int to) { return edges_[static_cast<size_t>(from * size_ + to)]; }
  bool agree(int from, int to) const { return headers[from] == headers[to]; }

  void send(int from, int to, const std::byte* data, size_t bytes) {
    demand(!is_being_received(from, data, bytes), "sent what is being received");
    Edge& way = edge(from, to);
    Message& message = at(way, way.sends++);
    message.source = data;
    message.sent_bytes = bytes;
    message.payload.assign(data, data + bytes);
    message.sent = true;
    message.eager = eager_ == Eager::kAlways || (eager_ == Eager::kSometimes && random_() % 2 == 0);
    traffic[from].messages += 1;
    traffic[from].bytes += static_cast<int64_t>(bytes);
    if (eager_ == Eager::kAlways) end_send(way, message);
    most_sends = std::max(most_sends, static_cast<int64_t>(way.sends - way.sends_ended));
  }

  void receive(int from, int to, std::byte* data, size_t bytes) {
    demand(!is_being_received(to, data, bytes) && !is_being_sent(to, data, bytes),
           "received into what is in flight");
    Edge& way = edge(from, to);
    Message& message = at(way, way.receives++);
    message.target = data;
    message.posted_bytes = bytes;
    message.rubbish.resize(bytes);
    for (std::byte& byte : message.rubbish) byte = static_cast<std::byte>(random_());
    std::copy(message.rubbish.begin(), message.rubbish.end(), data);
    message.posted = true;
    most_receives = std::max(most_receives, static_cast<int64_t>(way.receives - way.arrived));
    if (message.sent && message.send_ended && agree(from, to)) arrive(way, message);
  }

  bool is_being_received(int rank, const std::byte* data, size_t bytes) {
    for (int from = 0; from < size_; ++from) {
      const Edge& way = edge(from, rank);
      for (size_t i = way.arrived; i < way.messages.size(); ++i) {
        const Message& message = way.messages[i];
        if (!in_receive(message)) continue;
        if (overlap(data, bytes, message.target, message.posted_bytes)) return true;
      }
    }
    return false;
  }

  bool is_being_sent(int rank, const std::byte* data, size_t bytes) {
    for (int to = 0; to < size_; ++to) {
      const Edge& way = edge(rank, to);
      for (size_t i = way.sends_ended; i < way.messages.size(); ++i) {
        const Message& message = way.messages[i];
        if (in_send(message) && overlap(data, bytes, message.source, message.sent_bytes))
          return true;
      }
    }
    return false;
  }

  static Message& at(Edge& way, size_t number) {
    if (way.messages.size() <= number) way.messages.resize(number + 1);
    return way.messages[number];
  }

  std::vector<Event> possible_events() {
    std::vector<Event> events;
    for (int rank = 0; rank < size_; ++rank) {
      if (!devices_[rank]->is_idle()) events.push_back({-1, rank, 0, false});
    }
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        Edge& way = edge(from, to);
        for (size_t i = std::min(way.sends_ended, way.arrived); i < way.messages.size(); ++i) {
          const Message& message = way.messages[i];
          if (message.sent && in_receive(message) && agree(from, to)) {
            events.push_back({from, to, i, true});
          }
          if (in_send(message) && (message.eager || message.arrived)) {
            events.push_back({from, to, i, false});
          }
        }
      }
    }
    return events;
  }

  void happen(const Event& event) {
    if (event.from < 0) {
      devices_[event.to]->carry_out_next();
      touched_[event.to] = true;
      return;
    }
    Edge& way = edge(event.from, event.to);
    if (event.arrives) {
      arrive(way, way.messages[event.number]);
      touched_[event.to] = true;
    } else {
      end_send(way, way.messages[event.number]);
      touched_[event.from] = true;
    }
  }

  void arrive(Edge& way, Message& message) {
    demand(message.posted_bytes == message.sent_bytes, "two ends named different sizes");
    demand(std::equal(message.rubbish.begin(), message.rubbish.end(), message.target),
           "a posted receive was written to");
    const size_t bytes = std::min(message.posted_bytes, message.sent_bytes);
    std::copy_n(message.payload.begin(), bytes, message.target);
    message.arrived = true;
    while (way.arrived < way.messages.size() && way.messages[way.arrived].arrived) ++way.arrived;
  }

  void end_send(Edge& way, Message& message) {
    demand(std::equal(message.payload.begin(), message.payload.end(), message.source),
           "what was being sent was written to");
    message.send_ended = true;
    while (way.sends_ended < way.messages.size() && way.messages[way.sends_ended].send_ended) {
      ++way.sends_ended;
    }
  }

  int open_messages(int rank) {
    int open = 0;
    for (int other = 0; other < size_; ++other) {
      for (const Message& message : edge(rank, other).messages) open += in_send(message);
      for (const Message& message : edge(other, rank).messages) open += in_receive(message);
    }
    return open;
  }

  static bool in_send(const Message& message) { return message.sent && !message.send_ended; }
  static bool in_receive(const Message& message) { return message.posted && !message.arrived; }
  static bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
  }

  int size_;
  const uint64_t seed_;
  std::mt19937_64 random_;
  Eager eager_;
  std::vector<Edge> edges_;
  std::vector<bool> touched_;
  std::vector<std::unique_ptr<End>> channels_;
  std::vector<std::unique_ptr<PretendedDevice>> devices_;
};

}  // namespace ringdl::check

#include "engine/control.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

// The beginning of each message: receives are posted for any rank.
struct Sender {
  int32_t rank;
  uint32_t number;  // of the message, among those from this rank to that one
  uint32_t has_description;
};

Sender sender_of(const std::vector<std::byte>& bytes) {
  Sender sender;
  std::memcpy(&sender, bytes.data(), sizeof(sender));
  return sender;
}

template <class T>
void put(std::vector<std::unique_ptr<T>>& table, Ticket ticket, std::unique_ptr<T> value) {
  if (table.size() <= ticket) table.resize(ticket + 1);
  table[ticket] = std::move(value);
}

bool has_description(MessageType type) {
  return type == MessageType::kSubmit || type == MessageType::kBlocked;
}

}  // namespace

ControlPlane::ControlPlane(Transport& transport, std::function<void(const ControlMessage&)> handle)
    : transport_(transport), handle_(std::move(handle)) {
  for (int i = 0; i < kPostedReceives; ++i) post(std::make_unique<Envelope>());
}

void ControlPlane::post(std::unique_ptr<Envelope> envelope) {
  envelope->bytes.resize(sizeof(Sender) + kMaxControlBytes);
  const Ticket ticket = transport_.receive(envelope->from, kTag, envelope->bytes.data(),
                                           envelope->bytes.size(), *this);
  for (Near& near : near_) {
    if (near.rank == envelope->from) near.receive = ticket;
  }
  put(incoming_, ticket, std::move(envelope));
}

void ControlPlane::send(int to, MessageHead head, const Description* description,
                        const void* payload, size_t payload_bytes) {
  std::unique_ptr<Envelope> envelope;
  if (spare_.empty()) {
    envelope = std::make_unique<Envelope>();
  } else {
    envelope = std::move(spare_.back());
    spare_.pop_back();
  }
  const Sender sender{transport_.rank(), peers_[to].sent++, description != nullptr ? 1u : 0u};
  head.payload_bytes = static_cast<uint32_t>(payload_bytes);
  envelope->bytes.clear();
  const auto append = [&](const void* data, size_t bytes) {
    const auto* first = static_cast<const std::byte*>(data);
    envelope->bytes.insert(envelope->bytes.end(), first, first + bytes);
  };
  append(&sender, sizeof(sender));
  append(&head, sizeof(head));
  if (description != nullptr) append(description, sizeof(*description));
  append(payload, payload_bytes);
  ++messages_sent_;
  bytes_sent_ += static_cast<int64_t>(envelope->bytes.size());
  ++sending_;
  const Ticket ticket =
      transport_.send(to, kTag, envelope->bytes.data(), envelope->bytes.size(), *this);
  put(outgoing_, ticket, std::move(envelope));
}

void ControlPlane::ended(Ticket ticket) {
  if (ticket < outgoing_.size() && outgoing_[ticket]) {
    spare_.push_back(std::move(outgoing_[ticket]));
    --sending_;
    return;
  }
  std::unique_ptr<Envelope> envelope = std::move(incoming_[ticket]);
  arrived(*envelope);
  post(std::move(envelope));
}

void ControlPlane::arrived(const Envelope& envelope) {
  const Sender sender = sender_of(envelope.bytes);
  Peer& peer = peers_[sender.rank];
  ++messages_received_;
  if (envelope.from == Transport::kAnyRank && ++peer.heard == kHeardBefore) {
    peer.heard = 0;
    make_near(sender.rank);
  }
  for (Near& near : near_) {
    if (near.rank == sender.rank) near.heard_at = messages_received_;
  }
  if (sender.number != peer.read) {
    peer.early.emplace(sender.number, envelope.bytes);
    return;
  }
  ++peer.read;
  read(envelope.bytes);
  for (auto next = peer.early.find(peer.read); next != peer.early.end();
       next = peer.early.find(peer.read)) {
    const std::vector<std::byte> bytes = std::move(next->second);
    peer.early.erase(next);
    ++peer.read;
    read(bytes);
  }
}

// Replaces the rank that has been silent longest, if there are enough.
void ControlPlane::make_near(int rank) {
  for (const Near& near : near_) {
    if (near.rank == rank) return;
  }
  if (near_.size() == kNear) {
    const auto oldest =
        std::min_element(near_.begin(), near_.end(),
                         [](const Near& a, const Near& b) { return a.heard_at < b.heard_at; });
    const Ticket receive = oldest->receive;
    near_.erase(oldest);
    const std::unique_ptr<Envelope> envelope = std::move(incoming_[receive]);
    if (!transport_.withdraw(receive)) arrived(*envelope);
  }
  near_.push_back({rank, 0, messages_received_});
  auto envelope = std::make_unique<Envelope>();
  envelope->from = rank;
  post(std::move(envelope));
}

void ControlPlane::read(const std::vector<std::byte>& bytes) {
  const std::byte* at = bytes.data();
  const auto take = [&at](void* into, size_t count) {
    std::memcpy(into, at, count);
    at += count;
  };
  Sender sender;
  ControlMessage message{};
  take(&sender, sizeof(sender));
  take(&message.head, sizeof(message.head));
  if (sender.has_description != 0) take(&message.description, sizeof(message.description));
  if (has_description(message.head.type) != (sender.has_description != 0) ||
      message.head.payload_bytes > kMaxPayloadBytes) {
    throw Error("rank " + std::to_string(sender.rank) +
                " sent a message that this version of ringdl cannot read; install the same version "
                "on all hosts");
  }
  message.from = sender.rank;
  message.payload = at;
  handle_(message);
}

void ControlPlane::close() {
  for (Ticket ticket = 0; ticket < incoming_.size(); ++ticket) {
    if (incoming_[ticket]) transport_.withdraw(ticket);
  }
  incoming_.clear();
}

}  // namespace ringdl

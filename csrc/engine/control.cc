#include "engine/control.h"

#include <cstring>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

// The sender's rank travels in the message: receives are posted for any rank.
struct Sender {
  int32_t rank;
  uint32_t has_description;
};

bool has_description(MessageType type) {
  return type == MessageType::kSubmit || type == MessageType::kBlocked;
}

}  // namespace

ControlPlane::ControlPlane(Transport& transport, std::function<void(const ControlMessage&)> handle)
    : transport_(transport), handle_(std::move(handle)) {
  for (int i = 0; i < kPostedReceives; ++i) post(std::make_unique<Envelope>());
}

void ControlPlane::post(std::unique_ptr<Envelope> envelope) {
  envelope->arrived = false;
  envelope->bytes.resize(sizeof(Sender) + kMaxControlBytes);
  envelope->ticket = transport_.receive(Transport::kAnyRank, kTag, envelope->bytes.data(),
                                        envelope->bytes.size(), *this);
  posted_.push_back(std::move(envelope));
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
  const Sender sender{transport_.rank(), description != nullptr ? 1u : 0u};
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
  if (outgoing_.size() <= ticket) outgoing_.resize(ticket + 1);
  outgoing_[ticket] = std::move(envelope);
}

void ControlPlane::ended(Ticket ticket) {
  if (ticket < outgoing_.size() && outgoing_[ticket]) {
    spare_.push_back(std::move(outgoing_[ticket]));
    --sending_;
    return;
  }
  for (auto& envelope : posted_) {
    if (envelope->arrived || envelope->ticket != ticket) continue;
    envelope->arrived = true;
    break;
  }
  while (!posted_.empty() && posted_.front()->arrived) {
    std::unique_ptr<Envelope> envelope = std::move(posted_.front());
    posted_.pop_front();
    ++messages_received_;
    read(*envelope);
    post(std::move(envelope));
  }
}

void ControlPlane::read(const Envelope& envelope) {
  const std::byte* at = envelope.bytes.data();
  const auto take = [&at](void* into, size_t bytes) {
    std::memcpy(into, at, bytes);
    at += bytes;
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
  while (!posted_.empty()) {
    if (!posted_.back()->arrived) transport_.withdraw(posted_.back()->ticket);
    posted_.pop_back();
  }
}

}  // namespace ringdl

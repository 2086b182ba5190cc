#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/wire.h"
#include "transport/transport.h"

namespace ringdl {

/// A control message as it was received. The payload is valid while it is handled.
struct ControlMessage {
  int from;
  MessageHead head;
  Description description;  // of kSubmit and kBlocked
  const std::byte* payload;
};

/// Sends and receives control messages: always accepted, in order per sender, copied when sent.
class ControlPlane final : public Completion {
 public:
  static constexpr int kTag = 0;

  /// `handle` is called from Transport::poll() and may send.
  ControlPlane(Transport& transport, std::function<void(const ControlMessage&)> handle);

  void send(int to, MessageHead head, const Description* description = nullptr,
            const void* payload = nullptr, size_t payload_bytes = 0);

  /// Whether all that was sent has left.
  bool idle() const { return sending_ == 0; }

  /// Withdraws the posted receives; nothing is received after that.
  void close();

  int64_t messages_sent() const { return messages_sent_; }
  int64_t messages_received() const { return messages_received_; }
  int64_t bytes_sent() const { return bytes_sent_; }

  void ended(Ticket ticket) override;

 private:
  /// Enough for a burst to be taken in one poll; what exceeds it waits in the MPI library.
  static constexpr int kPostedReceives = 16;

  struct Envelope {
    Ticket ticket = 0;
    bool arrived = false;  // out of order; the ticket may be another operation's by now
    std::vector<std::byte> bytes;
  };

  void post(std::unique_ptr<Envelope> envelope);
  void read(const Envelope& envelope);

  Transport& transport_;
  std::function<void(const ControlMessage&)> handle_;
  std::deque<std::unique_ptr<Envelope>> posted_;     // in the order in which they will match
  std::vector<std::unique_ptr<Envelope>> outgoing_;  // by ticket
  std::vector<std::unique_ptr<Envelope>> spare_;
  int64_t sending_ = 0;
  int64_t messages_sent_ = 0;
  int64_t messages_received_ = 0;
  int64_t bytes_sent_ = 0;
};

}  // namespace ringdl

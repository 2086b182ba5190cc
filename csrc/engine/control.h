#pragma once

#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
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
///
/// Receives are posted for any rank, which MPI is bad at: the transport has to probe for messages
/// before it can post. So up to eight ranks that write often get a receive of their own; messages
/// are numbered, as two receives may then end in another order than their messages were sent.
class ControlPlane final : public Completion {
 public:
  static constexpr int kTag = 0;

  /// `handle` is called from Transport::poll() and may send.
  using OnMessage = std::function<void(const ControlMessage&)>;

  ControlPlane(Transport& transport, OnMessage handle);

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
  /// Enough to take a burst in one poll; what exceeds it waits in the MPI library.
  static constexpr int kPostedReceives = 16;

  /// How many ranks have a receive of their own, and after how many messages without one.
  static constexpr size_t kNear = 8;
  static constexpr int kHeardBefore = 16;

  struct Envelope {
    int from = Transport::kAnyRank;  // the rank its receive was posted for
    std::vector<std::byte> bytes;
  };

  struct Peer {
    uint32_t sent = 0;
    uint32_t read = 0;
    int heard = 0;  // since it last had a receive of its own
    std::map<uint32_t, std::vector<std::byte>> early;
  };

  struct Near {
    int rank;
    Ticket receive;
    int64_t heard_at;  // the serial number of its last message
  };

  void post(std::unique_ptr<Envelope> envelope);
  void arrived(const Envelope& envelope);
  void read(const std::vector<std::byte>& bytes);
  void make_near(int rank);

  Transport& transport_;
  OnMessage handle_;
  std::unordered_map<int, Peer> peers_;  // with which there were messages
  std::vector<Near> near_;
  std::vector<std::unique_ptr<Envelope>> incoming_;  // by ticket
  std::vector<std::unique_ptr<Envelope>> outgoing_;  // by ticket
  std::vector<std::unique_ptr<Envelope>> spare_;
  int64_t sending_ = 0;
  int64_t messages_sent_ = 0;
  int64_t messages_received_ = 0;
  int64_t bytes_sent_ = 0;
};

}  // namespace ringdl

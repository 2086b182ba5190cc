#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace ringdl::tcp {

/// Notified of what happens on a connection. Nothing here calls back into the connection.
class Receiver {
 public:
  /// All of a message has arrived, or what is left of it is given by begin_message().
  virtual void deliver(int from, int tag, const std::byte* data, size_t bytes) = 0;

  /// A message of more than Connection::kWholeBytes begins: returns where it goes.
  virtual std::byte* begin_message(int from, int tag, size_t bytes) = 0;
  /// All of it has arrived.
  virtual void end_message(int from) = 0;

  /// A send's buffer is not needed any more.
  virtual void sent(Ticket send) = 0;

 protected:
  ~Receiver() = default;
};

/// One end of a stream of messages between this rank and another. Nothing blocks.
class Connection {
 public:
  /// Messages of at most this size are delivered in one piece. Control messages are.
  static constexpr size_t kWholeBytes = 8 << 10;

  /// @param socket  taken over
  /// @throws Error  a system call fails
  Connection(Receiver& receiver, int peer, int socket);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int socket() const { return socket_; }

  /// Sends after the messages before it. If the connection is broken, it ends at once.
  void send(int tag, const std::byte* data, size_t bytes, Ticket ticket);

  /// Writes what can be written now.
  void write();
  /// Whether there is more to write than the system takes now.
  bool has_more_to_write() const { return !sends_.empty(); }

  /// Reads what can be read now, up to a bound, and notifies the receiver.
  /// @returns false once the other end is closed, or cannot be reached
  bool read();

  /// Why the other end cannot be reached; empty: it can be, or was closed.
  const std::string& why_lost() const { return why_lost_; }
  /// Whether the other end's host has acknowledged nothing for so long of what was sent: the
  /// system's own keep-alive looks at connections alone on which nothing is under way.
  bool is_unanswered_for(int64_t ns) const;
  /// Everything that is to be sent ends: the other end cannot be reached.
  void give_up(const std::string& why);

  /// Drops the rest of the message that begin_message() was called for.
  void discard_message() { into_ = nullptr; }

  /// No more sends: the other end reads the end of the stream after what was sent.
  void close_for_sending();

 private:
  struct Frame {
    uint32_t tag;
    uint32_t bytes;
  };

  struct Outgoing {
    Frame frame;
    const std::byte* data;
    Ticket ticket;
  };

  void parse();
  void drop_sends();
  void note_end(int error);

  Receiver& receiver_;
  const int peer_;
  const int socket_;
  std::deque<Outgoing> sends_;
  size_t written_ = 0;  // of the first one, with its frame
  std::string why_lost_;

  // What was read and is not delivered yet: the beginning of a message, or the end of a large one.
  std::vector<std::byte> staged_;
  size_t begin_ = 0;
  size_t end_ = 0;
  std::byte* into_ = nullptr;  // of the large message under way; null: nowhere
  size_t left_ = 0;            // bytes of it that have not arrived
};

/// Throws Error if a system call returned -1.
/// @returns what it returned
int check_call(int result, const char* call);

}  // namespace ringdl::tcp

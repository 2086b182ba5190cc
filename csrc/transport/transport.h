#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ringdl {

/// Names one message in flight. Small integers, reused after the operation has ended.
using Ticket = uint32_t;

/// Notified when operations end. Outlives every operation that it was handed to.
class Completion {
 public:
  /// Called from Transport::poll(); the ticket may be reused as soon as this returns. May start new
  /// operations.
  virtual void ended(Ticket ticket) = 0;

 protected:
  ~Completion() = default;
};

/// Messages between the ranks of one communicator.
///
/// Messages from one rank to another with the same tag arrive in the order in which they were sent
/// and match receives from that rank in the order in which those were posted; whether a receive
/// from any rank matches before one from that rank is unspecified. Nothing here blocks. Buffers
/// belong to the caller and must stay alive and unmoved until the operation has ended.
///
/// A message may have no bytes, and its data is then not looked at; a rank may send to itself.
///
/// Threads: calls are made by one thread at a time; the driver's lock ensures that. A forked child
/// makes none, and should not keep the other ranks from seeing that this process has ended.
/// Errors: where a message fails, the rank at its other end is lost(). A failure of the layer below
/// that belongs to no message raises Error, naming the call.
class Transport {
 public:
  static constexpr int kAnyRank = -1;

  /// Bytes of the longest message.
  static constexpr size_t kMaxMessageBytes = size_t{1} << 30;

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Largest usable tag; tags start at 0. Half of them, up to 65,536, bounds the works in flight;
  /// of the rest each bucket takes two. MPI promises 32,767.
  virtual int max_tag() const = 0;

  /// Starts to send `bytes` to rank `to`. Once started a send is drained, never cancelled.
  virtual Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) = 0;

  /// Posts a receive of at most `bytes` from rank `from`, or kAnyRank. A longer message is an
  /// error.
  virtual Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) = 0;

  /// Lets messages move and notifies the owners of operations that ended, in the order in which
  /// they ended as far as that is known. Returns how many did.
  virtual int poll() = 0;

  /// Withdraws a posted receive, waiting for the layer below if it must; its owner is not notified.
  /// Returns false if a message had been matched already: it has then been received.
  virtual bool withdraw(Ticket receive) = 0;

  /// A rank that is known to receive and send no more messages.
  struct Lost {
    int rank;
    std::string why;  // from the layer below; empty: its process has ended
  };
  /// In the order in which they were found. What they had sent has been received; sends to them
  /// end, and receives from them never do. A transport that cannot know leaves it empty: then ranks
  /// see only those of their own host end.
  virtual const std::vector<Lost>& lost() const {
    static const std::vector<Lost> none;
    return none;
  }

  /// Whether what was sent is still read once this is gone: such buffers are kept for good.
  virtual bool reads_on() const { return false; }

  /// Messages may have been sent that nobody will receive: makes sure that no later transport
  /// receives them.
  virtual void expect_stray_messages() {}
};

}  // namespace ringdl

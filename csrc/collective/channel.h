#pragma once

#include <cstddef>
#include <cstdint>

namespace ringdl {

/// The messages of one work to and from the other ranks.
///
/// Messages to and from each rank keep their order, and both sides must name the same sizes in the
/// same order: a collective knows them from what all ranks agreed on. Buffers stay alive and
/// unmoved until the message has ended. Nothing here blocks; messages move between two calls of
/// step().
class Channel {
 public:
  virtual ~Channel() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Sends the next message to rank `to`.
  virtual void send(int to, const void* data, size_t bytes) = 0;

  /// Posts the receive of the next message from rank `from`.
  virtual void receive(int from, void* data, size_t bytes) = 0;

  /// How many messages to rank `to` have ended, counted in order up to the first gap.
  virtual int64_t sent(int to) const = 0;

  /// How many messages from rank `from` have arrived, counted in order up to the first gap.
  virtual int64_t received(int from) const = 0;

  /// Whether the rank before this one is known to have called with the same arguments.
  virtual bool agreed() const = 0;
};

}  // namespace ringdl

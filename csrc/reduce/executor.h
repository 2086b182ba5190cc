#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reduce/codec.h"
#include "reduce/reduce_many.h"
#include "reduce/reducer.h"

namespace ringdl {

/// Copies and reduces payload, on a CPU or a device. Collectives touch payload only through it.
///
/// Operations are carried out in the order in which they are asked for, so each one sees what those
/// before it wrote. They may be carried out later: then the call returns a ticket. Until is_done()
/// is true, what an operation reads must not change, and nobody else may read what it writes: no
/// message sends it, and no counter announces it to another rank.
///
/// Threads: one at a time, except for an immediate one.
class Executor {
 public:
  /// Names an operation. Later ones have higher numbers.
  using Ticket = uint64_t;
  static constexpr Ticket kDone = 0;

  virtual ~Executor() = default;

  /// Whether each operation is done when its call returns: all tickets are kDone.
  virtual bool is_immediate() const { return false; }

  /// The operation that was asked for last; kDone if immediate.
  virtual Ticket last() const { return kDone; }

  /// Whether this operation, and so all before it, has been carried out.
  bool is_done(Ticket ticket) { return ticket == kDone || poll(ticket); }

  /// @param streams  nobody reads the target soon: it is written past the caches (streaming.h)
  virtual Ticket copy(std::byte* into, const std::byte* from, size_t bytes,
                      bool streams = false) = 0;
  /// As Reducer::combine() and finish(). The reducer is copied, as are those below.
  virtual Ticket combine(const Reducer& reducer, std::byte* into, const std::byte* from,
                         size_t bytes) = 0;
  virtual Ticket finish(const Reducer& reducer, std::byte* into, const std::byte* from,
                        size_t bytes) = 0;
  /// As ReduceMany::operator().
  virtual Ticket reduce(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                        std::span<std::byte* const> targets, size_t bytes,
                        bool streams = false) = 0;
  /// As Codec::pack() and unpack().
  virtual Ticket pack(const Codec& codec, std::byte* wire, const std::byte* array,
                      size_t bytes) = 0;
  virtual Ticket unpack(const Codec& codec, std::byte* array, const std::byte* wire,
                        size_t bytes) = 0;

 protected:
  /// @param ticket  not kDone
  virtual bool poll(Ticket ticket) = 0;
};

/// Carries everything out at once, in the calling thread. Any thread. Lives as long as the process.
Executor& cpu_executor();

}  // namespace ringdl

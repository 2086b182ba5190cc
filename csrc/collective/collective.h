#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "collective/channel.h"

namespace ringdl {

/// What a collective has collected from several ranks.
struct Gathered {
  std::vector<int64_t> lengths;  // bytes from each rank, in rank order
  Buffer data;                   // one after the other
};

/// One rank's part in one collective, as a state machine. It never blocks, sleeps, or reads a clock
/// or the environment, so the same code runs over MPI, over threads, and in a simulator.
///
/// No rank may be done before all ranks are known to have made the same call: neighbours compare
/// what they submitted, so each algorithm's messages pass every pair of neighbours in the ring of
/// ranks, or wait for a barrier that does. Otherwise a rank could return a result where the others
/// get a MismatchError. See docs/protocol.md.
class Collective {
 public:
  virtual ~Collective() = default;

  /// Posts receives that may be posted before this rank's data is ready. Optional. Neither this nor
  /// a constructor reads the payload, which may still be on its way from a device.
  virtual void prepare(Channel&) {}

  /// Whether it sends the next rank a message before it has received any from that rank. The header
  /// then travels with that message; otherwise alone, at once.
  virtual bool greets_next() const { return false; }

  /// Does what can be done now. True once nothing is left to do on this rank: its result is
  /// complete and its messages have ended. Not to be called after that.
  virtual bool step(Channel& channel) = 0;

  /// Pieces reduced so far in memory that other ranks write to, or -1 if there is no such memory.
  /// It changes without messages, so step() is then called at every poll.
  virtual int64_t pieces() const { return -1; }

  /// Whether a rank is known to have arrived without a message.
  virtual bool has_met(int) const { return false; }

  /// Once done: what it has collected, if the result's size is only known then.
  virtual Gathered* gathered() { return nullptr; }

  /// The work has failed, and step() is not called any more: ends what waits for other ranks on a
  /// device by itself.
  virtual void stop() noexcept {}

  /// Where it stands, for people: "ring allreduce: 12 of 24 segments received". What precedes the
  /// colon is the work's name in a trace.
  virtual std::string describe() const = 0;
};

}  // namespace ringdl

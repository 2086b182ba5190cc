#pragma once

#include <cstdint>

#include "collective/collective.h"

namespace ringdl {

/// How far something is that its ranks do in memory that they share, without messages.
enum class Polled : uint8_t {
  kAwaitsRanks,  // some have not arrived
  kUnderWay,     // all have
  kDone,
  kElsewhere  // some rank takes part in another way, so all do
};

/// A collective in memory that all its ranks share: no messages, so it can be polled without a
/// channel. step() makes progress whenever it is called.
class InMemory : public Collective {
 public:
  /// As Collective::step().
  virtual bool step_in_memory() = 0;
  bool step(Channel&) final { return step_in_memory(); }
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "engine/any_receives.h"
#include "engine/bucket_table.h"
#include "engine/control.h"
#include "engine/diagnosis.h"
#include "engine/group.h"
#include "engine/hosts.h"
#include "engine/immediate.h"
#include "engine/join_session.h"
#include "engine/mailbox.h"
#include "engine/matching.h"
#include "engine/membership.h"
#include "engine/planning.h"
#include "engine/tags.h"
#include "engine/watchdog.h"
#include "engine/work_table.h"
#include "transport/transport.h"

namespace ringdl {

struct EngineOptions {
  /// What travels and is reduced at once. The same on all ranks.
  size_t segment_bytes = 256 << 10;
  /// Messages of at most so many bytes travel as control messages; at most kMaxPayloadBytes.
  size_t inline_bytes = kMaxPayloadBytes;
  /// What copies and reduces payload; outlives the engine.
  Executor* executor = &cpu_executor();
  /// Those of devices' memory; null: arrays that lie there are refused.
  std::shared_ptr<DeviceExecutors> devices = nullptr;
  /// What is copied from and to a device at once: a multiple of 64. Long beside the latency of a
  /// copy (some microseconds) and of a collective (some tens), and short beside an array.
  size_t slab_bytes = 4 << 20;
};

/// What an engine is made of: its state. Each part knows some of those above it, and none the
/// engine. Submissions, Inbox and Failures hold the rules by which the parts work together.
struct Parts {
  /// @param on_message  what is done with a control message
  /// @param submitter, joining_owner, diagnosis_owner  not called before the engine is complete
  Parts(std::unique_ptr<Transport> its_transport, EngineOptions its_options, const Clock& its_clock,
        ControlPlane::OnMessage on_message, Submitter& submitter, JoinSession::Owner& joining_owner,
        Diagnosis::Owner& diagnosis_owner);
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  /// See Driver.

  const Clock& clock;
  std::unique_ptr<Transport> transport;  // null once the engine is closed
  const EngineOptions options;
  const int rank;
  const int size;
  const SharedGroup all;
  const TagLayout tags;
  const std::shared_ptr<ControlPlane> control;
  Matching matching;  // which uses of each key were submitted, and what arrived for later ones
  Hosts hosts;        // which ranks share memory
  Planning planning;  // a call or a bucket -> a Collective
  WorkTable works;    // in flight
  BucketTable buckets;
  Immediate immediate;       // allreduces that a caller polls itself
  Membership membership;     // which ranks have left or failed
  AnyReceives any_receives;  // receives that name no rank
  Mailbox mailbox;           // what this rank answers without having called
  JoinSession joining;       // answers for a rank that has joined
  Diagnosis diagnosis;       // why nothing moves
  Watchdog watchdog;
};

}  // namespace ringdl

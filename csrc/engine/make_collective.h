#pragma once

#include <memory>

#include "collective/collective.h"
#include "collective/host_layout.h"
#include "engine/call.h"
#include "reduce/executor.h"
#include "transport/window.h"

namespace ringdl {

struct SlotCall;

/// What a state machine is made from besides the call.
struct Surroundings {
  Executor& executor;                     // of the memory that the data lies in; outlives it
  size_t segment_bytes;                   // what travels and is reduced at once
  const std::shared_ptr<Window>& window;  // through which ranks of the group share memory; null if
                                          // none do
  const SharedLayout& layout;             // which ranks of the group do
  const SlotCall* slot_call;              // where they meet, if they do so in slots
};

/// The state machine that carries a call out.
/// @param data  as in Driver::submit()
/// @param group  the call's, never null
/// @throws UsageError  a root that is no rank, splits that do not fit, an array too large for the
/// algorithm, or ranks too far apart for it
std::unique_ptr<Collective> make_collective(const Surroundings& its, const Call& call,
                                            const Description& description, void* data,
                                            const Group& group);

/// What make_collective() refuses whatever the group.
/// @throws UsageError  a reduction or compression that the dtype has not
void refuse_wrong(const Call& call);

/// What reduces the arrays of a host's ranks: it divides if there is no other host.
ReduceMany over_host(DType dtype, Reduction reduction, const HostLayout& layout);

}  // namespace ringdl

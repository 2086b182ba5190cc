#pragma once

#include <memory>

#include "collective/collective.h"
#include "collective/host_layout.h"
#include "engine/call.h"
#include "transport/window.h"

namespace ringdl {

/// The state machine that carries a call out.
/// @param executor  of the memory that the call's data lies in; outlives the collective
/// @param data  as in Driver::submit()
/// @param group  the call's, never null
/// @param segment_bytes  what travels and is reduced at once
/// @param window  through which ranks of the group share memory; null if none do
/// @param layout  which ranks of the group do
/// @throws UsageError  a root that is no rank, splits that do not fit, an array too large for the
/// algorithm, or ranks too far apart for it
std::unique_ptr<Collective> make_collective(Executor& executor, const Call& call,
                                            const Description& description, void* data,
                                            const Group& group, size_t segment_bytes,
                                            const std::shared_ptr<Window>& window,
                                            const SharedLayout& layout);

}  // namespace ringdl

#pragma once

#include <cstddef>

#include "cuda/driver_api.h"

namespace ringdl::cuda {

const Functions& pretended_functions();

/// The next call of this name (as "cuMemAlloc") returns `result`.
void pretended_fail_next(const char* call, Result result);

/// Each call that queues something or asks for an event returns `result` from now on.
void pretended_break(Result result);

/// Bytes of a device that are allocated by this process.
size_t pretended_used(int device);

}  // namespace ringdl::cuda

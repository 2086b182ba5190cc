#pragma once

#include <string>

#include "cuda/driver_api.h"

namespace ringdl::cuda {

/// The driver of this machine's CUDA devices.
struct Driver {
  const Functions* functions = nullptr;  // null if there is none that can be used
  std::string why_not;                   // then: one sentence
  int version = 0;                       // the newest CUDA that it runs: 1000 * major + 10 * minor
};

/// Looked up in libcuda.so.1 by the first call, and kept for good. Any thread. Loads the driver,
/// which takes some milliseconds, but makes no context.
const Driver& driver();

/// @throws OutOfMemory  of a device or of pinned memory; DeviceError  for all else, with the call's
/// name and what the driver says
void check(const Functions& functions, Result result, const char* call);

}  // namespace ringdl::cuda

/// Calls a function of the driver and checks what it returns.
#define RINGDL_CUDA(functions, name, ...) \
  ::ringdl::cuda::check(functions, (functions).name(__VA_ARGS__), "cu" #name)

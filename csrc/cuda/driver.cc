#include "cuda/driver.h"

#include <dlfcn.h>

#include <bit>

#include "base/error.h"

namespace ringdl::cuda {
namespace {

// The library stays loaded: the driver does not survive being unloaded.
Driver find() {
  Driver found;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.why_not = "this machine has no CUDA driver (libcuda.so.1)";
    return found;
  }
  static Functions functions;
  const char* missing = nullptr;
#define RINGDL_CUDA_FUNCTION(name, symbol)                                           \
  functions.name = std::bit_cast<decltype(functions.name)>(dlsym(library, #symbol)); \
  if (functions.name == nullptr) missing = #symbol;
#include "cuda/driver_symbols.inc"
#undef RINGDL_CUDA_FUNCTION
  if (missing != nullptr) {
    found.why_not = std::string("the CUDA driver has no function ") + missing +
                    "; ringdl needs one of CUDA 12 or later";
    return found;
  }
  const Result result = functions.Init(0);
  if (result != kSuccess) {
    const char* text = nullptr;
    functions.GetErrorString(result, &text);
    found.why_not = std::string("the CUDA driver cannot be used: ") +
                    (text != nullptr ? text : "an unknown error");
    return found;
  }
  if (functions.DriverGetVersion(&found.version) != kSuccess) found.version = 0;
  found.functions = &functions;
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver found = find();
  return found;
}

void check(const Functions& functions, Result result, const char* call) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  functions.GetErrorString(result, &text);
  const std::string why = std::string(call) + ": " + (text != nullptr ? text : "an unknown error");
  if (result == kOutOfMemory) throw OutOfMemory(why);
  throw DeviceError(why);
}

}  // namespace ringdl::cuda

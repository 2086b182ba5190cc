// Compiled, never run, against a cuda.h: checks our declarations against the real ones.
#include <cuda.h>

#include "cuda/driver_api.h"
#include "cuda/plain.h"

namespace cuda = ringdl::cuda;

IS(CUresult, cuda::Result);
IS(CUdeviceptr, cuda::Address);
IS(CUcontext, cuda::Context);
IS(CUmodule, cuda::Module);
IS(CUfunction, cuda::Function);
IS(CUstream, cuda::Stream);
IS(CUevent, cuda::Event);
IS(CUuuid, cuda::Uuid);
IS(CUipcMemHandle, cuda::MemoryHandle);
IS(CUdevice_attribute, cuda::DeviceAttribute);
IS(CUpointer_attribute, cuda::PointerAttribute);
IS(CUstreamCaptureStatus, cuda::CaptureStatus);
IS(CUstreamCaptureMode, cuda::CaptureMode);

// `symbol` is what cuda.h makes of the name: driver.cc looks it up under the same.
#define TEXT_OF(symbol) #symbol
#define SYMBOL(symbol) TEXT_OF(symbol)
constexpr bool same(const char* a, const char* b) {
  for (; *a != 0 && *a == *b; ++a) ++b;
  return *a == *b;
}
#define RINGDL_CUDA_FUNCTION(name, symbol)                                                \
  static_assert(                                                                          \
      std::is_same_v<Plain<decltype(&cu##name)>::type, decltype(cuda::Functions::name)>); \
  static_assert(same(SYMBOL(cu##name), #symbol));
#include "cuda/driver_symbols.inc"

static_assert(CUDA_SUCCESS == cuda::kSuccess);
static_assert(CUDA_ERROR_INVALID_VALUE == cuda::kInvalidValue);
static_assert(CUDA_ERROR_OUT_OF_MEMORY == cuda::kOutOfMemory);
static_assert(CUDA_ERROR_NO_DEVICE == cuda::kNoDevice);
static_assert(CUDA_ERROR_NOT_READY == cuda::kNotReady);
static_assert(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED == cuda::kPeerAccessAlreadyEnabled);
static_assert(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED == cuda::kHostMemoryAlreadyRegistered);

template <class Ours, class Theirs>
constexpr bool equal(Ours ours, Theirs theirs) {
  return static_cast<long>(ours) == static_cast<long>(theirs);
}
using cuda::DeviceAttribute, cuda::PointerAttribute, cuda::MemoryType, cuda::CaptureStatus;
static_assert(equal(cuda::CaptureMode::kGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL));
static_assert(equal(cuda::CaptureMode::kThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
static_assert(equal(cuda::CaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED));
static_assert(equal(DeviceAttribute::kUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING));
static_assert(equal(DeviceAttribute::kCapabilityMajor,
                    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
static_assert(equal(DeviceAttribute::kCapabilityMinor,
                    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
static_assert(equal(DeviceAttribute::kMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
static_assert(equal(PointerAttribute::kMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE));
static_assert(equal(PointerAttribute::kIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED));
static_assert(equal(PointerAttribute::kDeviceNumber, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL));
static_assert(equal(MemoryType::kHost, CU_MEMORYTYPE_HOST));
static_assert(equal(MemoryType::kDevice, CU_MEMORYTYPE_DEVICE));
static_assert(equal(CaptureStatus::kNone, CU_STREAM_CAPTURE_STATUS_NONE));
static_assert(equal(CaptureStatus::kActive, CU_STREAM_CAPTURE_STATUS_ACTIVE));
static_assert(equal(CaptureStatus::kInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED));
static_assert(CU_STREAM_NON_BLOCKING == cuda::kStreamNonBlocking);
static_assert(CU_EVENT_DISABLE_TIMING == cuda::kEventDisableTiming);
static_assert(CU_MEMHOSTALLOC_PORTABLE == cuda::kHostAllocPortable);
static_assert(CU_MEMHOSTREGISTER_PORTABLE == cuda::kHostRegisterPortable);
static_assert(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == cuda::kIpcLazyEnablePeerAccess);

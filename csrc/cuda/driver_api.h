#pragma once

#include <cstddef>
#include <cstdint>

/// The part of the CUDA driver's C interface (cuda.h) that ringdl uses, declared here so that no
/// toolkit is needed to build. tests/csrc/cuda/driver_declarations.cc checks it against a real
/// cuda.h.
namespace ringdl::cuda {

using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kNotReady = 600;
inline constexpr Result kPeerAccessAlreadyEnabled = 704;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;

using DeviceNumber = int;
using Address = unsigned long long;  // of memory of a device, or of the host: one space for both
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;

struct Uuid {
  char bytes[16];
};
struct MemoryHandle {  // for another process of this host
  char reserved[64];
};

/// What cuDeviceGetAttribute is asked for.
enum class DeviceAttribute : int {
  kUnifiedAddressing = 41,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kMultiprocessors = 16,
};
/// What cuPointerGetAttributes is asked for.
enum class PointerAttribute : int {
  kMemoryType = 2,  // MemoryType; nothing for what the driver does not know
  kIsManaged = 8,
  kDeviceNumber = 9,
};
enum class MemoryType : unsigned { kUnknown = 0, kHost = 1, kDevice = 2 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

inline constexpr unsigned kStreamNonBlocking = 1;  // it does not wait for the default stream
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;     // pinned for all contexts
inline constexpr unsigned kHostRegisterPortable = 1;  // the same
inline constexpr unsigned kIpcLazyEnablePeerAccess = 1;

/// The functions, as types; their names are those of cuda.h without the "cu".
struct Functions {
  Result (*Init)(unsigned flags);
  Result (*DriverGetVersion)(int*);
  Result (*GetErrorName)(Result, const char**);
  Result (*GetErrorString)(Result, const char**);

  Result (*DeviceGetCount)(int*);
  Result (*DeviceGet)(DeviceNumber*, int ordinal);
  Result (*DeviceGetName)(char*, int length, DeviceNumber);
  Result (*DeviceGetUuid)(Uuid*, DeviceNumber);
  Result (*DeviceGetPCIBusId)(char*, int length, DeviceNumber);
  Result (*DeviceGetAttribute)(int*, DeviceAttribute, DeviceNumber);
  Result (*DeviceTotalMem)(size_t*, DeviceNumber);
  Result (*DeviceCanAccessPeer)(int*, DeviceNumber, DeviceNumber peer);

  Result (*DevicePrimaryCtxRetain)(Context*, DeviceNumber);
  Result (*DevicePrimaryCtxRelease)(DeviceNumber);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*CtxSynchronize)();
  Result (*CtxEnablePeerAccess)(Context, unsigned flags);

  Result (*ModuleLoadData)(Module*, const void* image);
  Result (*ModuleUnload)(Module);
  Result (*ModuleGetFunction)(Function*, Module, const char* name);
  Result (*LaunchKernel)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z,
                         unsigned shared_bytes, Stream, void** parameters, void** extra);

  Result (*MemAlloc)(Address*, size_t);
  Result (*MemFree)(Address);
  Result (*MemGetInfo)(size_t* free, size_t* total);
  Result (*MemHostAlloc)(void**, size_t, unsigned flags);
  Result (*MemFreeHost)(void*);
  Result (*MemHostRegister)(void*, size_t, unsigned flags);
  Result (*MemHostUnregister)(void*);
  Result (*MemcpyAsync)(Address into, Address from, size_t, Stream);
  Result (*MemsetD8Async)(Address, unsigned char, size_t, Stream);
  Result (*PointerGetAttributes)(unsigned count, PointerAttribute*, void** values, Address);

  Result (*StreamCreateWithPriority)(Stream*, unsigned flags, int priority);
  Result (*StreamDestroy)(Stream);
  Result (*StreamSynchronize)(Stream);
  Result (*StreamWaitEvent)(Stream, Event, unsigned flags);
  Result (*StreamIsCapturing)(Stream, CaptureStatus*);
  Result (*ThreadExchangeStreamCaptureMode)(CaptureMode*);
  Result (*EventCreate)(Event*, unsigned flags);
  Result (*EventDestroy)(Event);
  Result (*EventRecord)(Event, Stream);
  Result (*EventQuery)(Event);

  Result (*IpcGetMemHandle)(MemoryHandle*, Address);
  Result (*IpcOpenMemHandle)(Address*, MemoryHandle, unsigned flags);
  Result (*IpcCloseMemHandle)(Address);
};

}  // namespace ringdl::cuda

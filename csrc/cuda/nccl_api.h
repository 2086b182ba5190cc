#pragma once

#include <cstddef>

#include "cuda/driver_api.h"

/// The part of NCCL's C interface (nccl.h) that ringdl uses, declared here so that it is not needed
/// to build. tests/csrc/cuda/nccl_declarations.cc checks it against a real nccl.h.
namespace ringdl::cuda {

using NcclResult = int;
inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclInProgress = 7;

using NcclCommunicator = struct NcclCommunicatorTag*;

struct NcclId {
  char bytes[128];
};
/// That of NCCL 2.14. Later versions take it, and know by `version` what it lacks.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

enum class NcclType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9
};
enum class NcclOperation : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4 };

/// The functions, as types; their names are those of nccl.h without the "nccl".
struct NcclFunctions {
  NcclResult (*GetVersion)(int*);
  const char* (*GetErrorString)(NcclResult);
  NcclResult (*GetUniqueId)(NcclId*);
  NcclResult (*CommInitRankConfig)(NcclCommunicator*, int size, NcclId, int rank, NcclConfig*);
  NcclResult (*CommGetAsyncError)(NcclCommunicator, NcclResult*);
  NcclResult (*CommFinalize)(NcclCommunicator);
  NcclResult (*CommDestroy)(NcclCommunicator);
  NcclResult (*CommAbort)(NcclCommunicator);
  NcclResult (*AllReduce)(const void* from, void* into, size_t count, NcclType, NcclOperation,
                          NcclCommunicator, Stream);
};

}  // namespace ringdl::cuda

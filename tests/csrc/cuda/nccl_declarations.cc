// Compiled, never run, against an nccl.h: checks our declarations against the real ones.
#include <nccl.h>

#include "cuda/nccl_api.h"
#include "cuda/plain.h"

namespace cuda = ringdl::cuda;

IS(ncclResult_t, cuda::NcclResult);
IS(ncclUniqueId, cuda::NcclId);
IS(ncclComm_t, cuda::NcclCommunicator);
IS(ncclDataType_t, cuda::NcclType);
IS(ncclRedOp_t, cuda::NcclOperation);
IS(cudaStream_t, cuda::Stream);
template <>
struct Plain<ncclConfig_t*> {
  using type = cuda::NcclConfig*;
};
#define RINGDL_NCCL_FUNCTION(name) \
  static_assert(                   \
      std::is_same_v<Plain<decltype(&nccl##name)>::type, decltype(cuda::NcclFunctions::name)>);
#include "cuda/nccl_symbols.inc"

static_assert(ncclSuccess == cuda::kNcclSuccess);
static_assert(ncclInProgress == cuda::kNcclInProgress);
#define SAME(theirs, ours) static_assert(static_cast<int>(theirs) == static_cast<int>(ours))
SAME(ncclInt8, cuda::NcclType::kInt8);
SAME(ncclUint8, cuda::NcclType::kUInt8);
SAME(ncclInt32, cuda::NcclType::kInt32);
SAME(ncclUint32, cuda::NcclType::kUInt32);
SAME(ncclInt64, cuda::NcclType::kInt64);
SAME(ncclUint64, cuda::NcclType::kUInt64);
SAME(ncclFloat16, cuda::NcclType::kFloat16);
SAME(ncclFloat32, cuda::NcclType::kFloat32);
SAME(ncclFloat64, cuda::NcclType::kFloat64);
SAME(ncclBfloat16, cuda::NcclType::kBFloat16);
SAME(ncclSum, cuda::NcclOperation::kSum);
SAME(ncclProd, cuda::NcclOperation::kProduct);
SAME(ncclMax, cuda::NcclOperation::kMax);
SAME(ncclMin, cuda::NcclOperation::kMin);
SAME(ncclAvg, cuda::NcclOperation::kAverage);

// The configuration begins alike, and says how much of it there is.
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr cuda::NcclConfig kOurs;
static_assert(kTheirs.magic == kOurs.magic);
static_assert(kOurs.version == NCCL_VERSION(2, 14, 0));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(cuda::NcclConfig, blocking));
static_assert(sizeof(ncclConfig_t) >= sizeof(cuda::NcclConfig));

// NCCL for machines without devices: as many of its functions as ringdl uses, over the pretended
// driver. Ranks meet in a file of /dev/shm. As with the real one calls are matched by their order
// alone: a process ends with a message if ranks differ in it. That some work is not done yet is
// said three times each.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "cuda/nccl_api.h"
#include "reduce/reduce_many.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" ringdl::cuda::Result ringdl_pretended_queue(ringdl::cuda::Stream stream,
                                                       bool (*operation)(void*), void* argument);

namespace {

using namespace ringdl;

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 4;
constexpr int kInProgress = 7;
constexpr size_t kSlotBytes = 1 << 16;
constexpr int kTimesInProgress = 3;
std::atomic<int> calls = 0;

constexpr int kMostRanks = 16;

struct Shared {
  std::atomic<uint64_t> arrived;
  std::atomic<uint64_t> calls[kMostRanks];  // what each rank has called last
};

}  // namespace

struct ncclComm {
  int rank;
  int size;
  Shared* shared;
  std::atomic<uint64_t> meetings = 0;
  int in_progress = 0;
  std::atomic<bool> is_aborted = false;

  std::byte* slot(int of) const {
    return reinterpret_cast<std::byte*>(shared) + sizeof(Shared) +
           static_cast<size_t>(of) * kSlotBytes;
  }
  int arrive() {
    ++meetings;
    return static_cast<int>(shared->arrived.fetch_add(1) + 1);
  }
  bool have_all_arrived() const {
    return shared->arrived.load() >= meetings * static_cast<uint64_t>(size);
  }
  int later() {
    in_progress = kTimesInProgress;
    return kInProgress;
  }
};

namespace {

DType dtype_of(int type) {
  switch (type) {
    case 0:
      return DType::kInt8;
    case 1:
      return DType::kUInt8;
    case 2:
      return DType::kInt32;
    case 4:
      return DType::kInt64;
    case 6:
      return DType::kFloat16;
    case 7:
      return DType::kFloat32;
    case 8:
      return DType::kFloat64;
    default:
      return DType::kBFloat16;
  }
}

// One allreduce, in parts that fit into slots: each rank copies its part there, and once all have,
// takes the result.
struct Allreduce {
  ncclComm* comm;
  std::byte* data;
  size_t bytes;
  ReduceMany reduce_many;
  uint64_t call;
  size_t begin = 0;
  int phase = 0;

  bool step() {
    while (!comm->is_aborted && begin < bytes) {
      if (phase > 0 && !comm->have_all_arrived()) return false;
      const size_t part = std::min(kSlotBytes, bytes - begin);
      if (phase == 0) {
        comm->shared->calls[comm->rank] = call;
        std::memcpy(comm->slot(comm->rank), data + begin, part);
        comm->arrive();
      } else if (phase == 1) {
        std::vector<const std::byte*> slots;
        for (int rank = 0; rank < comm->size; ++rank) {
          slots.push_back(comm->slot(rank));
          if (comm->shared->calls[rank] != call) {
            std::fprintf(stderr, "pretended NCCL: ranks make different calls\n");
            std::abort();
          }
        }
        std::byte* const target = data + begin;
        reduce_many(slots, {&target, 1}, part);
        comm->arrive();
      } else {
        begin += part;
      }
      phase = (phase + 1) % 3;
    }
    return true;
  }
};

}  // namespace

/// How many allreduces this process has asked for.
EXPORT int ringdl_pretended_nccl_calls() { return calls; }

EXPORT const char* ncclGetErrorString(int result) {
  return result == kSuccess ? "no error" : "invalid argument";
}
EXPORT int ncclGetVersion(int* version) {
  *version = 21400;
  return kSuccess;
}
EXPORT int ncclGetUniqueId(cuda::NcclId* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/dev/shm/ringdl-pretended-nccl-%08x%08x", random(),
                random());
  return kSuccess;
}
EXPORT int ncclCommInitRankConfig(ncclComm** comm, int size, cuda::NcclId id, int rank,
                                  cuda::NcclConfig* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0) return kInvalidArgument;
  const int file = open(id.bytes, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const size_t bytes = sizeof(Shared) + static_cast<size_t>(size) * kSlotBytes;
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kInvalidArgument;
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return kInvalidArgument;
  *comm = new ncclComm{rank, size, static_cast<Shared*>(mapped)};
  if ((*comm)->arrive() == size) unlink(id.bytes);
  return (*comm)->later();
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  const bool is_alone = comm->meetings == 1 && !comm->have_all_arrived();
  *error = is_alone || comm->in_progress > 0 ? kInProgress : kSuccess;
  if (comm->in_progress > 0) --comm->in_progress;
  return kSuccess;
}
EXPORT int ncclCommFinalize(ncclComm* comm) { return comm->later(); }
EXPORT int ncclCommDestroy(ncclComm* comm) {
  if (comm->in_progress > 0) return kInvalidArgument;
  munmap(comm->shared, sizeof(Shared) + static_cast<size_t>(comm->size) * kSlotBytes);
  delete comm;
  return kSuccess;
}
EXPORT int ncclCommAbort(ncclComm* comm) {
  comm->is_aborted = true;
  return kSuccess;
}
EXPORT int ncclAllReduce(const void* from, void* into, size_t count, int type, int operation,
                         ncclComm* comm, cuda::Stream stream) {
  if (comm->in_progress > 0) return kInvalidArgument;  // it has not been asked whether it is ready
  if (from != into) return kInvalidArgument;
  const DType dtype = dtype_of(type);
  const Reduction reductions[] = {Reduction::kSum, Reduction::kProduct, Reduction::kMax,
                                  Reduction::kMin, Reduction::kAverage};
  ++calls;
  const uint64_t call = count * 1000 + static_cast<uint64_t>(type * 10 + operation);
  auto* const made = new Allreduce{comm, static_cast<std::byte*>(into), count * item_bytes(dtype),
                                   ReduceMany(dtype, reductions[operation], comm->size), call};
  const auto carry_out = [](void* argument) {
    auto* const its = static_cast<Allreduce*>(argument);
    const bool is_done = its->step();
    if (is_done) delete its;
    return is_done;
  };
  if (ringdl_pretended_queue(stream, carry_out, made) != cuda::kSuccess) return kInvalidArgument;
  return comm->later();
}

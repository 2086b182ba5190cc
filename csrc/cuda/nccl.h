#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/nccl_api.h"
#include "cuda/queue.h"
#include "reduce/device_library.h"

namespace ringdl::cuda {

/// NVIDIA's NCCL, if there is one.
struct Nccl {
  const NcclFunctions* functions = nullptr;  // null if there is none that can be used
  std::string why_not;                       // then: one sentence
  int version = 0;                           // 10000 * major + 100 * minor + patch
};

/// Looked up by the first call and kept for good: the one that this process has loaded already
/// (PyTorch's), that of a path below, or the system's. Any thread.
const Nccl& nccl();
/// Where it may be, besides. To be called before nccl(). Any thread.
void look_for_nccl_at(std::vector<std::string> paths);

/// Whether NCCL has such an allreduce.
bool reduces_by_nccl(DType dtype, Reduction reduction);

/// NCCL's communicator of the members of a group, each with a device of its own. It is made by the
/// first call, and does not block (NCCL 2.14): what takes time is asked for again.
class NcclGroup final : public DeviceLibrary {
 public:
  NcclGroup(Device& device, int rank, int size);
  ~NcclGroup() override;

  Member member(int device) override;
  const Id& id() override;
  uint64_t take_number() override { return taken_++; }
  std::optional<Executor::Ticket> call(uint64_t number, const Id& id, const Array& array) override;
  bool is_done(Executor::Ticket ticket) override;
  void abort() noexcept override;

 private:
  void ask(NcclResult result, const char* call);
  bool is_ready();
  void refuse_aborted() const;
  void finalize();

  Device& device_;
  const int rank_;
  const int size_;
  Queue queue_;
  std::optional<Id> id_;
  NcclCommunicator communicator_ = nullptr;
  const char* asked_ = nullptr;  // what NCCL may not have done yet
  uint64_t taken_ = 0;
  uint64_t next_ = 0;       // the number of the call that is made next,
  bool is_called_ = false;  // unless it is
  unsigned polls_ = 0;
  bool is_aborted_ = false;
};

}  // namespace ringdl::cuda

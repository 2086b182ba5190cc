#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/algorithm.h"
#include "collective/collective.h"
#include "collective/messages/bruck.h"
#include "collective/shared/shared_counters.h"
#include "collective/sub_channel.h"
#include "reduce/executor.h"
#include "transport/window.h"

namespace ringdl {

/// Allreduce of arrays on devices by ranks of one host. They tell one another by messages (Bruck)
/// where their arrays are, and reduce them there if all reach all of them; else through stages on
/// the devices (StagedAllreduce), which they reach if devices can at all. If some rank does not
/// reach another one's device, all go another way. Counters in the host's memory order the phases,
/// so nothing on a device waits for another process.
class DeviceAllreduce final : public Collective {
 public:
  using MayBegin = std::function<bool()>;
  using Fallback = std::function<std::unique_ptr<Collective>()>;

  /// @param its  of arrays on the device, with its executor; all ranks share a window
  /// @param devices  outlive this
  /// @param can_reduce  whether this rank's device has the reduction
  /// @param may_begin  whether the array may be read and written by now
  /// @param fallback  makes what reduces arrays that others do not reach
  DeviceAllreduce(const AllreduceArguments& its, DeviceExecutors& devices, int device,
                  bool can_reduce, MayBegin may_begin, Fallback fallback);
  ~DeviceAllreduce() override;

  bool step(Channel& channel) override;
  int64_t pieces() const override;
  std::string describe() const override;

 private:
  // What a rank has found out, in the counters.
  enum Found : uint64_t { kReaches = 1, kDoesNotReach = 2 };

  // What ranks tell one another first.
  struct Array {
    DevicePlace place;      // nowhere, if others do not reach it
    int64_t counters = -1;  // of the first rank: where they are in its memory
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  bool meet(Channel& channel);
  bool reach(Channel& channel);
  bool choose();
  template <class Told>
  void tell(const Told& own);
  template <class Told>
  std::vector<Told> told() const;

  Executor& executor_;
  DeviceExecutors& devices_;
  const int device_;
  const bool can_reduce_;
  const MayBegin may_begin_;
  const Fallback fallback_;
  const std::shared_ptr<Window> window_;
  const std::vector<int> ranks_;
  std::byte* const data_;
  const size_t bytes_;
  const ReduceMany reduce_many_;
  const int rank_;
  std::shared_ptr<std::byte> counters_;  // on the first rank
  SubChannel messages_;                  // after those of the exchange before
  std::optional<Bruck> exchange_;        // of arrays, then of stages if there are any
  bool are_direct_ = false;
  std::shared_ptr<std::byte> stage_;
  std::vector<std::byte*> reached_;  // arrays or stages, of all ranks
  SharedCounters shared_;            // once ranks have met
  bool has_told_ = false;            // what it reaches
  bool may_touch_ = false;           // the array, by now
  std::unique_ptr<Collective> chosen_;
  bool is_done_ = false;
};

}  // namespace ringdl

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "reduce/executor.h"

namespace ringdl {

/// Another library's allreduce of arrays on devices, by the members of a group: NCCL's. It matches
/// calls by their order, which LibraryAllreduce agrees on.
///
/// Threads: one at a time.
class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;

  /// What members are told of this rank.
  struct Member {
    enum State : int64_t { kReady = 0, kMissing = 1, kOtherDevice = 2, kAborted = 3 };
    std::array<int64_t, 2> device{};  // no other device anywhere has the same
    int64_t state = kReady;
  };
  /// @param device  that a call's array lies on; only that of the first call takes part
  virtual Member member(int device) = 0;

  /// What members find one another by. Made by the first call, on the first member; others have it
  /// from there.
  using Id = std::array<std::byte, 128>;
  /// @throws DeviceError
  virtual const Id& id() = 0;
  /// On the first member: the number of the next call.
  virtual uint64_t take_number() = 0;

  struct Array {
    std::byte* data;  // on the device; this rank's contribution and then the result
    size_t count;
    DType dtype;
    Reduction reduction;
  };
  /// Makes a call once those before it were made, and nothing of what it needs is on its way;
  /// nothing until then. Ask again.
  /// @returns  what is_done() is asked for
  /// @throws DeviceError  the library reports an error, or was aborted
  virtual std::optional<Executor::Ticket> call(uint64_t number, const Id& id,
                                               const Array& array) = 0;
  /// Whether the result is there.
  /// @throws DeviceError
  virtual bool is_done(Executor::Ticket ticket) = 0;

  /// Ends what waits for other members, on the device as well. It is not used any more.
  virtual void abort() noexcept = 0;
};

}  // namespace ringdl

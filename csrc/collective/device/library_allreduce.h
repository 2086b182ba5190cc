#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "collective/algorithm.h"
#include "collective/collective.h"
#include "collective/messages/bruck.h"
#include "collective/messages/tree_broadcast.h"
#include "collective/sub_channel.h"
#include "reduce/device_library.h"

namespace ringdl {

/// Why these members cannot use the library together; empty if they can.
std::string why_no_library(std::span<const DeviceLibrary::Member> members);

/// Allreduce of arrays on devices by another library, which matches calls by their order and may
/// hang where ranks differ in it. Here ranks submit works in any order. So all tell one another
/// that they are here (Bruck), then the first member gives the work the next number and broadcasts
/// it, and each rank makes the library's calls in the order of these numbers. As a work has a
/// number only once all have submitted it, none waits for what some rank may submit later:
///
///     rank 0   A B | A=0, B=1 | call A, call B
///     rank 1   B A |          | call A, call B
///
/// If the members cannot use the library, all find so by what they have told.
class LibraryAllreduce final : public Collective {
 public:
  using MayBegin = std::function<bool()>;
  using Fallback = std::function<std::unique_ptr<Collective>()>;

  /// @param library  of the group; outlives this
  /// @param device  of the array
  /// @param may_begin  whether the array may be read and written by now
  /// @param is_asked_for  on all ranks: then it is an error if some rank cannot use the library
  /// @param fallback  makes what reduces instead
  LibraryAllreduce(DeviceLibrary& library, int device, const DeviceLibrary::Array& array, int rank,
                   int size, MayBegin may_begin, bool is_asked_for, Fallback fallback);

  bool step(Channel& channel) override;
  bool greets_next() const override { return true; }
  int64_t pieces() const override;
  void stop() noexcept override;
  std::string describe() const override;

 private:
  // What ranks tell one another first.
  struct Here {
    DeviceLibrary::Member member;
    int64_t is_asked_for = 0;
  };
  // What the first member tells all.
  struct Turn {
    uint64_t number;
    DeviceLibrary::Id id;
  };

  bool meet(Channel& channel);
  bool take_turn();

  DeviceLibrary& library_;
  const DeviceLibrary::Array array_;
  const int rank_;
  const int size_;
  const MayBegin may_begin_;
  const Fallback fallback_;
  Bruck here_;
  SubChannel messages_;  // after those of here_
  bool has_met_ = false;
  std::unique_ptr<Collective> otherwise_;
  Turn turn_{};
  std::optional<TreeBroadcast> broadcast_;
  bool has_turn_ = false;
  bool may_touch_ = false;  // the array, by now
  std::optional<Executor::Ticket> ticket_;
};

/// Of arrays on devices alone: make_on_device() makes it.
extern const AllreduceAlgorithm kNcclAlgorithm;

}  // namespace ringdl

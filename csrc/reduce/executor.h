#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>

#include "reduce/codec.h"
#include "reduce/reduce_many.h"
#include "reduce/reducer.h"

namespace ringdl {

/// Copies and reduces payload, on a CPU or a device. Collectives touch payload only through it.
///
/// Operations are carried out in the order in which they are asked for, so each one sees what those
/// before it wrote. They may be carried out later: then the call returns a ticket. Until is_done()
/// is true, what an operation reads must not change, and nobody else may read what it writes: no
/// message sends it, and no counter announces it to another rank.
///
/// Threads: one at a time, except for an immediate one.
class Executor {
 public:
  /// Names an operation. Later ones have higher numbers.
  using Ticket = uint64_t;
  static constexpr Ticket kDone = 0;

  virtual ~Executor() = default;

  /// Whether each operation is done when its call returns: all tickets are kDone.
  virtual bool is_immediate() const { return false; }

  /// What it is asked for at once where ranks share out an array: so much that asking costs little
  /// beside doing it, and so little that nobody waits long for the last one.
  struct Grain {
    size_t least_piece, most_piece;  // bytes of what one rank takes
    size_t least_block, most_block;  // of what goes through stages
    int most_pieces = 8;             // about half a millisecond, in which the driver's lock is held
  };
  virtual Grain grain() const { return {16 << 10, 128 << 10, 256 << 10, 1 << 20}; }
  /// How many arrays it reduces at once.
  virtual size_t most_arrays() const { return std::numeric_limits<size_t>::max(); }

  /// The operation that was asked for last; kDone if immediate.
  virtual Ticket last() const { return kDone; }

  /// Whether this operation, and so all before it, has been carried out.
  bool is_done(Ticket ticket) { return ticket == kDone || poll(ticket); }

  /// @param streams  nobody reads the target soon: it is written past the caches (streaming.h)
  virtual Ticket copy(std::byte* into, const std::byte* from, size_t bytes,
                      bool streams = false) = 0;
  virtual Ticket zero(std::byte* into, size_t bytes) = 0;
  /// As Reducer::combine() and finish(). The reducer is copied, as are those below.
  virtual Ticket combine(const Reducer& reducer, std::byte* into, const std::byte* from,
                         size_t bytes) = 0;
  virtual Ticket finish(const Reducer& reducer, std::byte* into, const std::byte* from,
                        size_t bytes) = 0;
  /// As ReduceMany::operator().
  virtual Ticket reduce(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                        std::span<std::byte* const> targets, size_t bytes,
                        bool streams = false) = 0;
  /// As Codec::pack() and unpack().
  virtual Ticket pack(const Codec& codec, std::byte* wire, const std::byte* array,
                      size_t bytes) = 0;
  virtual Ticket unpack(const Codec& codec, std::byte* array, const std::byte* wire,
                        size_t bytes) = 0;

 protected:
  /// @param ticket  not kDone
  virtual bool poll(Ticket ticket) = 0;
};

/// Until an operation is done, or the device is lost, which then touches nothing any more: for
/// destructors of what the device uses.
inline void await(Executor& executor, Executor::Ticket ticket) noexcept {
  try {
    while (!executor.is_done(ticket)) {
    }
  } catch (...) {
  }
}

/// Where an array on a device lies, for other ranks of this host. As numbers that travel; what they
/// mean is the executors' own.
struct DevicePlace {
  std::array<int64_t, 13> words{};

  /// Whether others can reach it: else it is nowhere.
  explicit operator bool() const { return words[0] != 0; }
  auto operator<=>(const DevicePlace&) const = default;
};

/// What was in a stream of the caller's at some time.
class Mark {
 public:
  virtual ~Mark() = default;
  /// Whether the device has come past it. Whoever waits asks again: if a stream of the executor
  /// waited instead, so would all that comes after it there.
  /// @throws DeviceError
  virtual bool is_passed() = 0;
};

/// How arrays of a device are copied to others there, many at once.
struct Packing {
  DType from;  // that of the others, or float32 and a narrower float
  DType to;
  double scale = 1;  // elements are multiplied with it, in fp32 (or fp64), before they are cast
  /// A DeviceExecutors::counter(): how many results are infinite or NaN is added to it. Null: they
  /// are not counted.
  uint64_t* non_finite = nullptr;
};
/// Whether there is such a cast, or none is needed.
bool can_pack(DType from, DType to);

struct PackItem {
  const std::byte* from;
  std::byte* to;  // null: elements are counted, and not copied
  size_t count;   // elements
};

class DeviceLibrary;

/// The executors of devices' memory, by the devices' numbers. What a call makes is kept.
///
/// Threads: one at a time, but for the members that say so.
class DeviceExecutors {
 public:
  virtual ~DeviceExecutors() = default;
  /// @throws UsageError  there is no such device, or no driver
  virtual Executor& of(int device) = 0;
  /// Another one of the same device, for copies that need not wait for those of the first.
  virtual Executor& second_of(int device) = 0;

  /// @param stream  of a device; null: the default one. Any thread.
  /// @throws UsageError  what is queued there is being recorded to be repeated later, which a
  /// collective cannot be
  virtual std::unique_ptr<Mark> mark(int device, void* stream) = 0;
  /// Waits for all that devices met so far have to do, whatever the stream. Any thread.
  virtual void synchronize() = 0;

  /// Whether a device has the kernels for pack(). Any thread.
  virtual bool packs(int device) = 0;
  /// Packs in a stream of the caller's: what comes after it there may overwrite the sources. Any
  /// thread.
  /// @throws UsageError  no such cast; DeviceError
  virtual void pack(int device, void* stream, const Packing& how,
                    std::span<const PackItem> items) = 0;
  /// Zero; read it when the device has come past what adds to it. Any thread.
  /// @throws OutOfMemory
  virtual std::shared_ptr<uint64_t> counter(int device) = 0;

  /// From now on no array lies where others could reach it: see place_of(). Call it at first.
  virtual void use_no_peers() = 0;
  /// Memory of a device, zero, for arrays of callers; other ranks of this host may reach it. Any
  /// thread.
  /// @throws UsageError, OutOfMemory
  virtual std::shared_ptr<std::byte> allocate(int device, size_t bytes) = 0;
  /// The same, of any content, for a short time and for executors alone.
  virtual std::shared_ptr<std::byte> device_stage(int device, size_t bytes) = 0;
  /// Where an array lies; nowhere unless one of these has made it, and the device can reduce. Any
  /// thread.
  virtual DevicePlace place_of(int device, const std::byte* data, size_t bytes) = 0;
  /// An array of another rank, or of this one, for operations of a device; null if it cannot be
  /// reached from there, or the device cannot reduce. It stays reached until let_go(), in which
  /// time its owner does not free it.
  virtual std::byte* reached(int device, const DevicePlace& place) = 0;
  /// Others may write to this memory even now.
  virtual void keep(std::shared_ptr<std::byte> memory) = 0;
  /// What was reached and kept is not used any more.
  virtual void let_go() = 0;

  /// Whether a device has a user's reduction. Any thread.
  virtual bool has_custom(int device, CustomKernel kernel) = 0;

  /// Whether another library (NCCL) has such an allreduce, if it is there. Any thread.
  virtual bool library_reduces(DType dtype, Reduction reduction) = 0;
  /// That library's part for a group of ranks, which lives until close_libraries().
  /// @param group  distinguishes groups
  /// @param device  of this rank in it; the first call decides
  virtual DeviceLibrary& library(uint64_t group, int rank, int size, int device) = 0;
  /// No rank uses it any more.
  virtual void close_libraries() = 0;

  using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;
  /// Memory of the host that devices copy from and to while the processor does other things, unless
  /// the driver refuses to pin it. At a multiple of 64.
  /// @param allocate  of the host
  virtual std::shared_ptr<std::byte> pinned(int device, size_t bytes, const Allocate& allocate) = 0;
  /// The same for a short time: when it is free it is kept for the next call, up to a bound.
  virtual std::shared_ptr<std::byte> stage(int device, size_t bytes, const Allocate& allocate) = 0;
};

/// Carries everything out at once, in the calling thread. Any thread. Lives as long as the process.
Executor& cpu_executor();

}  // namespace ringdl

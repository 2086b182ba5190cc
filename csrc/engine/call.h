#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/memory.h"
#include "collective/algorithm.h"
#include "engine/group.h"
#include "engine/wire.h"

namespace ringdl {

/// A user-defined reduction.
struct Operation {
  CustomKernel kernel = nullptr;  // null: one of ours
  uint64_t digest = 0;            // distinguishes functions; not 0
  std::string name;               // for people
};

/// What a call means, without its buffer.
struct Call {
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kSum;
  int root = -1;  // its number in the group
  std::vector<int64_t> shape;
  std::string name;             // empty: matched by its number among its kind
  SharedGroup group = nullptr;  // null: all ranks
  std::optional<Algorithm> algorithm =
      std::nullopt;  // of an allreduce; by default chosen by its size
  Operation operation = {};
  /// The dtype that float32 is sent as between hosts, if not unchanged: float16 or bfloat16.
  std::optional<DType> compression = std::nullopt;
  /// Rows for each rank: of an alltoall, and on the root of a scatter.
  std::vector<int64_t> splits = {};
  /// Where a reducescatter puts this rank's rows: the caller's, as `data` of Driver::submit().
  void* output = nullptr;
  /// Where the arrays lie.
  Memory memory = {};
  /// Of a device: what was queued in this stream before the call comes before it. Null: the default
  /// one.
  void* stream = nullptr;
  /// Of a message: to this rank, from any other member of the group that has sent one.
  bool from_any = false;
};

/// The first dimension.
int64_t rows_of(const Call& call);

/// Bytes of one row, along the first dimension. Where rows may be uneven but hold nothing, each
/// counts as one byte, so that lengths give their number.
size_t row_bytes(const Call& call);

/// Bytes of the whole array.
size_t bytes_of(const Call& call);

/// Distinguishes calls of one kind that ranks disagree on.
uint64_t digest_of(const Call& call);

/// What is sent to other ranks about a call. Leaves out the algorithm.
Description describe(const Call& call);

}  // namespace ringdl

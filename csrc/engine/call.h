#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collective/algorithm.h"
#include "engine/group.h"
#include "engine/wire.h"

namespace ringdl {

/// A reduction of the user's own.
struct Operation {
  CustomKernel kernel = nullptr;  // null: one of ours
  uint64_t digest = 0;            // tells functions apart; not 0
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
  /// What float32 travels as between hosts, if not as it is: float16 or bfloat16.
  std::optional<DType> compression = std::nullopt;
  /// Rows for each rank: of an alltoall, and on the root of a scatter.
  std::vector<int64_t> splits = {};
  /// Where a reducescatter puts this rank's rows: the caller's, as `data` of Driver::submit().
  void* output = nullptr;
  /// Of a message: to this rank, from whichever other member of the group has sent one.
  bool from_any = false;
};

/// The first dimension.
int64_t rows_of(const Call& call);

/// Bytes of one row, along the first dimension. Where rows may be uneven but hold nothing, each
/// counts as one byte, so that lengths tell how many there are.
size_t row_bytes(const Call& call);

/// Bytes of the whole array.
size_t bytes_of(const Call& call);

/// Tells apart calls of one kind that ranks disagree on.
uint64_t digest_of(const Call& call);

/// What other ranks are told of a call. Leaves out the algorithm.
Description describe(const Call& call);

}  // namespace ringdl

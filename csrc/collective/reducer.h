#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/reduce.h"

namespace ringdl {

/// The only thing through which a collective touches payload.
class Reducer {
 public:
  Reducer(DType dtype, Reduction reduction, int64_t divisor)
      : kernels_(find_kernels(dtype, reduction)),
        item_bytes_(ringdl::item_bytes(dtype)),
        divisor_(divisor) {}

  size_t item_bytes() const { return item_bytes_; }

  /// into = into ∘ from.
  void combine(std::byte* into, const std::byte* from, size_t bytes) const {
    kernels_.combine(into, from, bytes / item_bytes_);
  }

  /// The last of all: into = (into ∘ from) / divisor if the reduction is an average.
  void finish(std::byte* into, const std::byte* from, size_t bytes) const {
    kernels_.finish(into, from, bytes / item_bytes_, divisor_);
  }

 private:
  Kernels kernels_;
  size_t item_bytes_;
  int64_t divisor_;
};

}  // namespace ringdl

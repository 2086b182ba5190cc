#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reduce/reduce.h"

namespace ringdl {

/// Reduces several arrays at once, in the given order, in one pass over memory. Pure; any thread.
class ReduceMany {
 public:
  /// 16-bit floats are added (and multiplied) in fp32 and rounded once, in the end.
  ReduceMany(DType dtype, Reduction reduction, int64_t divisor);
  ReduceMany(DType dtype, CustomKernel kernel);

  DType dtype() const { return dtype_; }
  Reduction reduction() const { return reduction_; }  // unless there is a custom one
  int64_t divisor() const { return divisor_; }
  CustomKernel custom() const { return custom_; }

  /// targets[t][i] = (sources[0][i] ∘ sources[1][i] ∘ ...) / divisor for all t. A target may be one
  /// of the sources, but must not overlap otherwise. At least one source.
  /// @param streams  the arrays come from memory and are not read soon (see streaming.h). Targets
  /// that are no sources are then written past the caches, and this ends with the fence. Targets
  /// that are sources are written in place: that costs no more traffic, and less time than past the
  /// caches. With two arrays they are fetched ahead.
  void operator()(std::span<const std::byte* const> sources, std::span<std::byte* const> targets,
                  size_t bytes, bool streams = false) const;

 private:
  void reduce(std::byte* block, std::span<const std::byte* const> sources, size_t begin,
              size_t bytes) const;
  void reduce_widened(std::byte* block, std::span<const std::byte* const> sources, size_t begin,
                      size_t bytes) const;

  DType dtype_;
  Reduction reduction_ = Reduction::kSum;
  Kernels kernels_{};  // for fp32 if elements are widened
  Widening widening_{};
  CustomKernel custom_ = nullptr;
  size_t item_bytes_;
  int64_t divisor_ = 1;
};

}  // namespace ringdl

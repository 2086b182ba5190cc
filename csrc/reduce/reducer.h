#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rounding.h"
#include "reduce/reduce.h"

namespace ringdl {

/// How two arrays become one in collectives that use messages. An executor carries it out.
class Reducer {
 public:
  Reducer(DType dtype, Reduction reduction, int64_t divisor)
      : dtype_(dtype),
        reduction_(reduction),
        divisor_(divisor),
        kernels_(find_kernels(dtype, reduction)),
        item_bytes_(ringdl::item_bytes(dtype)) {}

  /// Combines by a user-defined reduction, the last time too.
  /// @param kernel  for elements of `dtype`; must stay callable as long as the reducer is used
  Reducer(DType dtype, CustomKernel kernel)
      : dtype_(dtype), custom_(kernel), item_bytes_(ringdl::item_bytes(dtype)) {}

  DType dtype() const { return dtype_; }
  Reduction reduction() const { return reduction_; }  // unless there is a custom one
  int64_t divisor() const { return divisor_; }
  CustomKernel custom() const { return custom_; }
  size_t item_bytes() const { return item_bytes_; }

  /// into = into ∘ from.
  void combine(std::byte* into, const std::byte* from, size_t bytes) const {
    const DefaultRounding rounding;
    if (custom_ != nullptr) {
      custom_(into, from, static_cast<int64_t>(bytes / item_bytes_));
    } else {
      kernels_.combine(into, from, bytes / item_bytes_);
    }
  }

  /// The last combination: into = (into ∘ from) / divisor if the reduction is an average.
  void finish(std::byte* into, const std::byte* from, size_t bytes) const {
    if (custom_ != nullptr) {
      combine(into, from, bytes);
    } else {
      const DefaultRounding rounding;
      kernels_.finish(into, from, bytes / item_bytes_, divisor_);
    }
  }

 private:
  DType dtype_;
  Reduction reduction_ = Reduction::kSum;
  int64_t divisor_ = 1;
  Kernels kernels_{};
  CustomKernel custom_ = nullptr;  // in place of `kernels_`
  size_t item_bytes_;
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <optional>

#include "base/rounding.h"
#include "reduce/reduce.h"

namespace ringdl {

/// Shrinks bytes on the wire: fp32 is sent as a 16-bit float, rounded to nearest even.
class Codec {
 public:
  /// Nothing is shrunk.
  Codec() = default;
  /// @param wire  float16 or bfloat16; elements are float32
  explicit Codec(DType wire) : wire_(wire), widening_(find_widening(wire)) {}

  std::optional<DType> wire() const { return wire_; }  // if it shrinks
  bool shrinks() const { return widening_.widen != nullptr; }

  /// Bytes on the wire for `bytes` bytes of an array.
  size_t wire_bytes(size_t bytes) const { return shrinks() ? bytes / 2 : bytes; }

  /// @param bytes  of the array
  void pack(std::byte* wire, const std::byte* array, size_t bytes) const {
    const DefaultRounding rounding;
    widening_.narrow(wire, reinterpret_cast<const float*>(array), bytes / sizeof(float));
  }
  void unpack(std::byte* array, const std::byte* wire, size_t bytes) const {
    const DefaultRounding rounding;
    widening_.widen(reinterpret_cast<float*>(array), wire, bytes / sizeof(float));
  }

 private:
  std::optional<DType> wire_;
  Widening widening_{};
};

}  // namespace ringdl

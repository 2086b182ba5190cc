#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringdl {

/// Element types. The values travel in headers, so they never change.
enum class DType : uint8_t {
  kFloat64 = 0,
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt64 = 4,
  kInt32 = 5,
  kInt16 = 6,
  kInt8 = 7,
  kUInt8 = 8,
  kBool = 9,
};
inline constexpr int kDTypeCount = 10;

/// Bytes of one element.
constexpr size_t item_bytes(DType dtype) {
  constexpr size_t bytes[kDTypeCount] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1};
  return bytes[static_cast<int>(dtype)];
}

/// NumPy's name of the type ("float32", "bfloat16", "bool").
constexpr std::string_view name_of(DType dtype) {
  constexpr std::string_view names[kDTypeCount] = {"float64", "float32", "float16", "bfloat16",
                                                   "int64",   "int32",   "int16",   "int8",
                                                   "uint8",   "bool"};
  return names[static_cast<int>(dtype)];
}

constexpr bool is_floating(DType dtype) { return static_cast<int>(dtype) <= 3; }

}  // namespace ringdl

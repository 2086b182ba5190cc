#include "reduce/neutral.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/error.h"

namespace ringdl {
namespace {

template <class T>
void fill(void* data, size_t count, T value) {
  std::fill_n(static_cast<T*>(data), count, value);
}

template <class T>
T neutral_integer(Reduction reduction) {
  switch (reduction) {
    case Reduction::kMin:
      return std::numeric_limits<T>::max();
    case Reduction::kMax:
      return std::numeric_limits<T>::min();
    case Reduction::kProduct:
      return 1;
    case Reduction::kBitAnd:
      return static_cast<T>(-1);
    default:
      return 0;
  }
}

template <class T>
T neutral_float(Reduction reduction) {
  switch (reduction) {
    case Reduction::kMin:
      return std::numeric_limits<T>::infinity();
    case Reduction::kMax:
      return -std::numeric_limits<T>::infinity();
    case Reduction::kProduct:
      return T{1};
    default:
      return -T{0};
  }
}

// The bits of a 16-bit float.
uint16_t neutral_half(Reduction reduction, uint16_t infinity, uint16_t one) {
  constexpr uint16_t sign = 0x8000;
  switch (reduction) {
    case Reduction::kMin:
      return infinity;
    case Reduction::kMax:
      return infinity | sign;
    case Reduction::kProduct:
      return one;
    default:
      return sign;
  }
}

// Sum and max are or, product, min and average are and.
uint8_t neutral_bool(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMax:
    case Reduction::kBitOr:
    case Reduction::kBitXor:
      return 0;
    default:
      return 1;
  }
}

}  // namespace

void fill_neutral(DType dtype, Reduction reduction, void* data, size_t count) {
  switch (dtype) {
    case DType::kFloat64:
      return fill(data, count, neutral_float<double>(reduction));
    case DType::kFloat32:
      return fill(data, count, neutral_float<float>(reduction));
    case DType::kFloat16:
      return fill(data, count, neutral_half(reduction, 0x7c00, 0x3c00));
    case DType::kBFloat16:
      return fill(data, count, neutral_half(reduction, 0x7f80, 0x3f80));
    case DType::kInt64:
      return fill(data, count, neutral_integer<int64_t>(reduction));
    case DType::kInt32:
      return fill(data, count, neutral_integer<int32_t>(reduction));
    case DType::kInt16:
      return fill(data, count, neutral_integer<int16_t>(reduction));
    case DType::kInt8:
      return fill(data, count, neutral_integer<int8_t>(reduction));
    case DType::kUInt8:
      return fill(data, count, neutral_integer<uint8_t>(reduction));
    case DType::kBool:
      return fill(data, count, neutral_bool(reduction));
  }
  throw Error("there is no such dtype");
}

}  // namespace ringdl

#include "reduce/finite.h"

namespace ringdl {
namespace {

// Those with all bits of the exponent set. In parts, whose counts are as narrow as the elements, so
// that compilers make vectors of them.
template <class Bits>
uint64_t count_with(const std::byte* data, size_t count, Bits exponent) {
  const auto* const bits = reinterpret_cast<const Bits*>(data);
  constexpr size_t kPart = 1 << 15;
  uint64_t found = 0;
  for (size_t begin = 0; begin < count; begin += kPart) {
    const size_t end = count - begin < kPart ? count : begin + kPart;
    Bits here = 0;
    for (size_t i = begin; i < end; ++i) here += (bits[i] & exponent) == exponent;
    found += here;
  }
  return found;
}

}  // namespace

uint64_t count_non_finite(DType dtype, const std::byte* data, size_t count) {
  switch (dtype) {
    case DType::kFloat64:
      return count_with<uint64_t>(data, count, 0x7ff0000000000000);
    case DType::kFloat32:
      return count_with<uint32_t>(data, count, 0x7f800000);
    case DType::kFloat16:
      return count_with<uint16_t>(data, count, 0x7c00);
    case DType::kBFloat16:
      return count_with<uint16_t>(data, count, 0x7f80);
    default:
      return 0;
  }
}

}  // namespace ringdl

// What float32 becomes on the wire and back: every 16-bit pattern, and rounding to nearest even.

#include "reduce/codec.h"

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"

using namespace ringdl;

namespace {

std::vector<uint16_t> packed(const Codec& codec, const std::vector<float>& values) {
  std::vector<uint16_t> wire(values.size());
  codec.pack(reinterpret_cast<std::byte*>(wire.data()),
             reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float));
  return wire;
}

std::vector<float> unpacked(const Codec& codec, const std::vector<uint16_t>& wire) {
  std::vector<float> values(wire.size());
  codec.unpack(reinterpret_cast<std::byte*>(values.data()),
               reinterpret_cast<const std::byte*>(wire.data()), values.size() * sizeof(float));
  return values;
}

// What is on the wire already stays as it is; NaN becomes the one of each format.
void keeps_every_pattern(DType dtype, uint16_t quiet_nan) {
  const Codec codec(dtype);
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const std::vector<float> values = unpacked(codec, all);
  const std::vector<uint16_t> again = packed(codec, values);
  int wrong = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    wrong += again[i] != (std::isnan(values[i]) ? quiet_nan : all[i]) ? 1 : 0;
  }
  CHECK_EQ(wrong, 0);
}

void rounds_to_nearest_even() {
  const float one = 1.0f;
  const auto ulp_after_one = [one](int bits) { return one + std::ldexp(1.0f, -bits); };
  const std::vector<uint16_t> half = packed(
      Codec(DType::kFloat16), {one, ulp_after_one(11), ulp_after_one(11) + ulp_after_one(10) - one,
                               ulp_after_one(12), 65520.0f, 65519.0f});
  CHECK(half == std::vector<uint16_t>({0x3c00, 0x3c00, 0x3c02, 0x3c00, 0x7c00, 0x7bff}));
  const std::vector<uint16_t> brain = packed(
      Codec(DType::kBFloat16), {one, ulp_after_one(8), ulp_after_one(8) + ulp_after_one(7) - one,
                                ulp_after_one(9), std::numeric_limits<float>::max()});
  CHECK(brain == std::vector<uint16_t>({0x3f80, 0x3f80, 0x3f82, 0x3f80, 0x7f80}));
}

}  // namespace

int main() {
  CHECK(!Codec().shrinks());
  CHECK_EQ(Codec().wire_bytes(100), 100u);
  CHECK_EQ(Codec(DType::kBFloat16).wire_bytes(100), 50u);
  keeps_every_pattern(DType::kFloat16, 0x7e00);
  keeps_every_pattern(DType::kBFloat16, 0x7fc0);
  rounds_to_nearest_even();
  return check::report();
}

#include "reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "reduce/neutral.h"

// Every dtype, reduction and instruction set against a reference that shares nothing with the
// kernels: it decodes elements to double or to 128-bit integers, and rounds by dividing by the last
// bit of the result and rounding that to an integer.
namespace ringdl {
namespace {

__extension__ using Wide = __int128;

constexpr size_t kSizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4097};
constexpr int64_t kDivisors[] = {1,
                                 2,
                                 3,
                                 7,
                                 8,
                                 100,
                                 127,
                                 128,
                                 129,
                                 255,
                                 256,
                                 300,
                                 32767,
                                 32768,
                                 32769,
                                 65536,
                                 1000003,
                                 int64_t{1} << 31,
                                 (int64_t{1} << 31) + 1,
                                 (int64_t{1} << 62) + 12345,
                                 std::numeric_limits<int64_t>::max()};

/// 16-bit formats by the bits of their exponent and mantissa.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  uint16_t nan;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
constexpr Format kHalf = {5, 10, 0x7e00};
constexpr Format kBrain = {8, 7, 0x7fc0};

double decode(const Format& format, uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  double value;
  if (exponent == (1 << format.exponent_bits) - 1) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << format.mantissa_bits),
                       exponent - format.bias() - format.mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

uint16_t encode(const Format& format, double value) {
  if (std::isnan(value)) return format.nan;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity =
      static_cast<uint16_t>(((1 << format.exponent_bits) - 1) << format.mantissa_bits);
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias());
  const auto units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const int bits = units + ((exponent + format.bias() - 1) << format.mantissa_bits);
  return static_cast<uint16_t>(sign | std::min<int>(bits, infinity));
}

double lesser(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

double combine_doubles(Reduction reduction, double a, double b) {
  if (reduction == Reduction::kMin) return lesser(a, b);
  if (reduction == Reduction::kMax) return -lesser(-a, -b);
  return reduction == Reduction::kProduct ? a * b : a + b;
}

/// One element in fp32. Rounding the result in double again is harmless: double has more than twice
/// the digits of float.
float combine_floats(Reduction reduction, float a, float b, int64_t divisor) {
  const auto combined = static_cast<float>(combine_doubles(reduction, a, b));
  if (divisor == 0 || reduction != Reduction::kAverage) return combined;
  return static_cast<float>(static_cast<double>(combined) /
                            static_cast<double>(static_cast<float>(divisor)));
}

template <class T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(void* into, T value) {
  if (value != value) value = std::numeric_limits<T>::quiet_NaN();
  std::memcpy(into, &value, sizeof value);
}

template <class T>
void refer_integer(Reduction reduction, char* into, const char* from, int64_t divisor) {
  const Wide a = load<T>(into);
  const Wide b = load<T>(from);
  Wide result = a + b;
  if (reduction == Reduction::kMin) result = std::min(a, b);
  if (reduction == Reduction::kMax) result = std::max(a, b);
  if (reduction == Reduction::kProduct) result = a * b;
  if (reduction == Reduction::kBitAnd) result = a & b;
  if (reduction == Reduction::kBitOr) result = a | b;
  if (reduction == Reduction::kBitXor) result = a ^ b;
  const auto wrapped = static_cast<T>(static_cast<uint64_t>(result));
  const bool divides = reduction == Reduction::kAverage && divisor != 0;
  store<T>(into, divides ? static_cast<T>(static_cast<Wide>(wrapped) / divisor) : wrapped);
}

void refer_narrow(const Format& format, Reduction reduction, char* into, const char* from,
                  int64_t divisor) {
  const auto a = static_cast<float>(decode(format, load<uint16_t>(into)));
  const auto b = static_cast<float>(decode(format, load<uint16_t>(from)));
  store(into, encode(format, combine_floats(reduction, a, b, divisor)));
}

void refer_double(Reduction reduction, char* into, const char* from, int64_t divisor) {
  double result = combine_doubles(reduction, load<double>(into), load<double>(from));
  if (divisor != 0 && reduction == Reduction::kAverage) result /= static_cast<double>(divisor);
  store(into, result);
}

void refer_bool(Reduction reduction, char* into, const char* from) {
  const bool any = reduction == Reduction::kSum || reduction == Reduction::kMax ||
                   reduction == Reduction::kBitOr;
  if (reduction == Reduction::kBitXor) {
    *into = (*into != 0) != (*from != 0);
    return;
  }
  *into = any ? *into != 0 || *from != 0 : *into != 0 && *from != 0;
}

/// One element of the reference. A divisor of 0 stands for the combining kernel.
void refer(DType dtype, Reduction reduction, char* into, const char* from, int64_t divisor) {
  switch (dtype) {
    case DType::kFloat64:
      return refer_double(reduction, into, from, divisor);
    case DType::kFloat32:
      return store(into, combine_floats(reduction, load<float>(into), load<float>(from), divisor));
    case DType::kFloat16:
      return refer_narrow(kHalf, reduction, into, from, divisor);
    case DType::kBFloat16:
      return refer_narrow(kBrain, reduction, into, from, divisor);
    case DType::kInt64:
      return refer_integer<int64_t>(reduction, into, from, divisor);
    case DType::kInt32:
      return refer_integer<int32_t>(reduction, into, from, divisor);
    case DType::kInt16:
      return refer_integer<int16_t>(reduction, into, from, divisor);
    case DType::kInt8:
      return refer_integer<int8_t>(reduction, into, from, divisor);
    case DType::kUInt8:
      return refer_integer<uint8_t>(reduction, into, from, divisor);
    case DType::kBool:
      return refer_bool(reduction, into, from);
  }
}

/// Values at the edges of a dtype, as the low bytes of 64-bit words.
std::vector<uint64_t> edge_values(DType dtype) {
  const int bits = 8 * static_cast<int>(item_bytes(dtype));
  const uint64_t top = uint64_t{1} << (bits - 1);
  std::vector<uint64_t> values = {0, 1, 2, 3, top, top - 1, top - 2, top + 1, top | (top - 1), 127};
  if (!is_floating(dtype)) return values;
  const int mantissa_bits[] = {52, 23, 10, 7};
  const int shift = mantissa_bits[static_cast<int>(dtype)];
  const uint64_t infinity = (top - 1) >> shift << shift;
  const uint64_t last_bit = 1;
  const uint64_t smallest_normal = uint64_t{1} << shift;
  const uint64_t one = infinity / 2 >> shift << shift;
  for (const uint64_t magnitude :
       {infinity, infinity - last_bit, infinity + last_bit, infinity | smallest_normal / 2,
        infinity - smallest_normal, smallest_normal, smallest_normal - 1, smallest_normal + 1,
        smallest_normal / 2, one, one + 1, one - 1, one + smallest_normal}) {
    values.push_back(magnitude);
    values.push_back(magnitude | top);
  }
  return values;
}

struct Pair {
  std::vector<char> into;
  std::vector<char> from;
};

/// All pairs of edge values.
Pair edge_pairs(DType dtype) {
  Pair pair;
  const size_t bytes = item_bytes(dtype);
  const std::vector<uint64_t> values = edge_values(dtype);
  for (const uint64_t a : values) {
    for (const uint64_t b : values) {
      const auto* a_bytes = reinterpret_cast<const char*>(&a);
      const auto* b_bytes = reinterpret_cast<const char*>(&b);
      pair.into.insert(pair.into.end(), a_bytes, a_bytes + bytes);
      pair.from.insert(pair.from.end(), b_bytes, b_bytes + bytes);
    }
  }
  return pair;
}

/// Random bits; for floats, every other pair of elements shares its exponent within a few, so that
/// sums are not mostly one of the two.
Pair random_pairs(DType dtype, size_t count, std::mt19937_64& random) {
  const size_t bytes = item_bytes(dtype);
  Pair pair{std::vector<char>(count * bytes), std::vector<char>(count * bytes)};
  for (size_t i = 0; i < count; ++i) {
    const uint64_t a = random();
    uint64_t b = random();
    if (is_floating(dtype) && i % 2 == 0) {
      const uint64_t low = (uint64_t{1} << (bytes * 8 - (bytes == 2 ? 7 : 10))) - 1;
      b = (a & ~low) | (b & low);
    }
    std::memcpy(&pair.into[i * bytes], &a, bytes);
    std::memcpy(&pair.from[i * bytes], &b, bytes);
  }
  return pair;
}

std::string label(DType dtype, Reduction reduction, SimdLevel level, int64_t divisor) {
  std::ostringstream text;
  text << name_of(dtype) << " " << name_of(reduction) << " " << name_of(level) << " / " << divisor;
  return text.str();
}

std::string hex(const char* element, size_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, bytes);
  std::ostringstream text;
  text << std::hex << bits;
  return text.str();
}

/// Runs one kernel on a copy that starts `skipped` elements into an aligned buffer and checks every
/// element, that the bytes around are left alone, and that `from` is unchanged.
void compare(DType dtype, Reduction reduction, SimdLevel level, int64_t divisor, const Pair& pair,
             size_t skipped) {
  const size_t bytes = item_bytes(dtype);
  const size_t start = 64 + skipped * bytes;
  const size_t total = start + pair.into.size() + 64;
  auto* into = static_cast<char*>(::operator new(total, std::align_val_t{64}));
  auto* from = static_cast<char*>(::operator new(total, std::align_val_t{64}));
  std::memset(into, 0x5a, total);
  std::memset(from, 0xa5, total);
  const size_t count = pair.into.size() / bytes;
  if (count > 0) {
    std::memcpy(into + start, pair.into.data(), pair.into.size());
    std::memcpy(from + start, pair.from.data(), pair.from.size());
  }
  const Kernels kernels = find_kernels(dtype, reduction, level);
  if (divisor == 0) {
    kernels.combine(into + start, from + start, count);
  } else {
    kernels.finish(into + start, from + start, count, divisor);
  }
  std::vector<char> expected = pair.into;
  std::string wrong;
  for (size_t i = 0; i < count; ++i) {
    char* element = &expected[i * bytes];
    const char* got = into + start + i * bytes;
    refer(dtype, reduction, element, &pair.from[i * bytes], divisor);
    if (wrong.empty() && std::memcmp(element, got, bytes) != 0) {
      wrong = hex(&pair.into[i * bytes], bytes) + " and " + hex(&pair.from[i * bytes], bytes) +
              " gave " + hex(got, bytes) + " instead of " + hex(element, bytes);
    }
  }
  for (size_t i = 0; i < total; ++i) {
    const bool inside = i >= start && i < start + pair.into.size();
    if (!inside && into[i] != 0x5a) wrong += " wrote outside";
    const char source = inside ? pair.from[i - start] : static_cast<char>(0xa5);
    if (from[i] != source) wrong += " changed its source";
  }
  check::record(wrong.empty(), __FILE__, __LINE__,
                label(dtype, reduction, level, divisor) + ": " + wrong);
  ::operator delete(into, std::align_val_t{64});
  ::operator delete(from, std::align_val_t{64});
}

template <class Function>
void for_each_kernel(const Function& function) {
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (int reduction = 0; reduction < kReductionCount; ++reduction) {
      if (!has_reduction(static_cast<DType>(dtype), static_cast<Reduction>(reduction))) continue;
      for (int level = 0; level <= static_cast<int>(detect_simd_level()); ++level) {
        function(static_cast<DType>(dtype), static_cast<Reduction>(reduction),
                 static_cast<SimdLevel>(level));
      }
    }
  }
}

void test_sizes_and_starts() {
  std::mt19937_64 random(1);
  for_each_kernel([&](DType dtype, Reduction reduction, SimdLevel level) {
    for (const size_t size : kSizes) {
      const Pair pair = random_pairs(dtype, size, random);
      for (const size_t skipped : {0, 1, 3}) {
        compare(dtype, reduction, level, 0, pair, skipped);
        compare(dtype, reduction, level, 3, pair, skipped);
      }
    }
  });
}

void test_edges() {
  for_each_kernel([](DType dtype, Reduction reduction, SimdLevel level) {
    const Pair pair = edge_pairs(dtype);
    compare(dtype, reduction, level, 0, pair, 0);
    for (const int64_t divisor : kDivisors) compare(dtype, reduction, level, divisor, pair, 0);
  });
}

void test_divisors() {
  std::mt19937_64 random(2);
  for_each_kernel([&](DType dtype, Reduction reduction, SimdLevel level) {
    if (reduction != Reduction::kAverage) return;
    const Pair pair = random_pairs(dtype, 2000, random);
    for (const int64_t divisor : kDivisors) compare(dtype, reduction, level, divisor, pair, 0);
    for (int64_t divisor = 1; divisor <= 70; ++divisor) {
      compare(dtype, reduction, level, divisor, pair, 0);
    }
    for (int i = 0; i < 100; ++i) {
      const auto divisor = static_cast<int64_t>(random() >> (1 + i % 63) | 1);
      compare(dtype, reduction, level, divisor, pair, 0);
    }
  });
}

/// Every 16-bit float with partners that reach all ways of rounding.
void test_all_16_bit_floats() {
  constexpr uint16_t half_partners[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x1001,
                                        0x2e66, 0x3555, 0x3bff, 0x3c00, 0x3c01, 0xbc01, 0x4fff,
                                        0x7800, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xfe00};
  constexpr uint16_t brain_partners[] = {0x0000, 0x8000, 0x0001, 0x007f, 0x0080, 0x3eab,
                                         0x3f7f, 0x3f80, 0x3f81, 0xbf81, 0x4049, 0x7f7f,
                                         0xff7f, 0x7f80, 0xff80, 0x7f81, 0xffc0};
  for_each_kernel([&](DType dtype, Reduction reduction, SimdLevel level) {
    if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return;
    const bool half = dtype == DType::kFloat16;
    const std::vector<uint16_t> partners =
        half ? std::vector<uint16_t>(std::begin(half_partners), std::end(half_partners))
             : std::vector<uint16_t>(std::begin(brain_partners), std::end(brain_partners));
    for (const uint16_t partner : partners) {
      Pair pair{std::vector<char>(2 << 16), std::vector<char>(2 << 16)};
      for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
        const auto element = static_cast<uint16_t>(bits);
        std::memcpy(&pair.into[2 * bits], &element, 2);
        std::memcpy(&pair.from[2 * bits], &partner, 2);
      }
      compare(dtype, reduction, level, reduction == Reduction::kAverage ? 3 : 0, pair, 0);
    }
  });
}

template <class T>
T run_one(DType dtype, Reduction reduction, SimdLevel level, T a, T b, int64_t divisor) {
  find_kernels(dtype, reduction, level).finish(&a, &b, 1, divisor);
  return a;
}

/// The contract in plain numbers, without the reference.
void test_examples() {
  constexpr int8_t lowest8 = -128;
  for (int i = 0; i <= static_cast<int>(detect_simd_level()); ++i) {
    const auto level = static_cast<SimdLevel>(i);
    const auto half = [&](Reduction reduction, uint16_t a, uint16_t b, int64_t divisor = 1) {
      return run_one(DType::kFloat16, reduction, level, a, b, divisor);
    };
    const auto byte = [&](DType dtype, Reduction reduction, int a, int b, int64_t divisor = 1) {
      return run_one(dtype, reduction, level, static_cast<uint8_t>(a), static_cast<uint8_t>(b),
                     divisor);
    };
    // 2048 + 1 and 2050 + 1 lie halfway: to even. 2048 + 1.001 does not.
    CHECK_EQ(half(Reduction::kSum, 0x6800, 0x3c00), 0x6800);
    CHECK_EQ(half(Reduction::kSum, 0x6801, 0x3c00), 0x6802);
    CHECK_EQ(half(Reduction::kSum, 0x6800, 0x3c01), 0x6801);
    // 65504 + 16 rounds to infinity, and 65504 + 15.99 to 65504; a third is taken before rounding.
    CHECK_EQ(half(Reduction::kSum, 0x7bff, 0x4c00), 0x7c00);
    CHECK_EQ(half(Reduction::kSum, 0x7bff, 0x4bff), 0x7bff);
    CHECK_EQ(half(Reduction::kAverage, 0x7bff, 0x7bff, 2), 0x7bff);
    CHECK_EQ(half(Reduction::kProduct, 0x0001, 0x3800), 0x0000);
    CHECK_EQ(half(Reduction::kProduct, 0x0003, 0x3800), 0x0002);
    CHECK_EQ(half(Reduction::kMax, 0xfc01, 0x7c00), 0x7e00);
    CHECK_EQ(half(Reduction::kMin, 0x0000, 0x8000), 0x8000);
    CHECK_EQ(half(Reduction::kMax, 0x8000, 0x0000), 0x0000);
    CHECK_EQ(byte(DType::kUInt8, Reduction::kSum, 200, 100), 44);
    CHECK_EQ(byte(DType::kUInt8, Reduction::kAverage, 200, 55, 2), 127);
    CHECK_EQ(byte(DType::kUInt8, Reduction::kAverage, 200, 55, 1000), 0);
    CHECK_EQ(static_cast<int8_t>(byte(DType::kInt8, Reduction::kAverage, -3, -4, 2)), -3);
    CHECK_EQ(static_cast<int8_t>(byte(DType::kInt8, Reduction::kAverage, lowest8, 0, 1)), lowest8);
    CHECK_EQ(static_cast<int8_t>(byte(DType::kInt8, Reduction::kAverage, lowest8, 0, 128)), -1);
    CHECK_EQ(static_cast<int8_t>(byte(DType::kInt8, Reduction::kAverage, lowest8, 0, 129)), 0);
    CHECK_EQ(byte(DType::kBool, Reduction::kSum, 2, 0), 1);
    CHECK_EQ(byte(DType::kBool, Reduction::kProduct, 2, 4), 1);
    CHECK_EQ(byte(DType::kBool, Reduction::kAverage, 1, 0, 2), 0);
    CHECK_EQ(byte(DType::kBool, Reduction::kAverage, 1, 1, 2), 1);
    CHECK_EQ(byte(DType::kUInt8, Reduction::kBitAnd, 0xb5, 0x1f), 0x15);
    CHECK_EQ(byte(DType::kUInt8, Reduction::kBitOr, 0xb5, 0x1f), 0xbf);
    CHECK_EQ(byte(DType::kInt8, Reduction::kBitXor, 0xb5, 0x1f), 0xaa);
    CHECK_EQ(byte(DType::kBool, Reduction::kBitAnd, 2, 4), 1);
    CHECK_EQ(byte(DType::kBool, Reduction::kBitOr, 0, 4), 1);
    CHECK_EQ(byte(DType::kBool, Reduction::kBitXor, 2, 4), 0);
  }
}

// Random bits of a dtype, but no NaN, whose bits change; of bool 0 and 1.
std::vector<std::byte> any_elements(DType dtype, size_t count) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(count * item_bytes(dtype));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (size_t i = 0; i < count; ++i) {
    std::byte* const at = bytes.data() + i * item_bytes(dtype);
    std::byte& last = at[item_bytes(dtype) - 1];
    if (dtype == DType::kBool) *at &= std::byte{1};
    if (is_floating(dtype)) last &= std::byte{0xbf};  // an exponent of less than half the range
    if (is_floating(dtype) && i % 5 == 0) {           // zeros of both signs
      std::fill_n(at, item_bytes(dtype), std::byte{0});
      last = i % 2 == 0 ? std::byte{0x80} : std::byte{0};
    }
  }
  return bytes;
}

void test_neutral_elements() {
  constexpr size_t kCount = 1001;
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int r = 0; r < kReductionCount; ++r) {
      const auto dtype = static_cast<DType>(d);
      const auto reduction = static_cast<Reduction>(r);
      if (!has_reduction(dtype, reduction)) continue;
      const std::vector<std::byte> elements = any_elements(dtype, kCount);
      std::vector<std::byte> neutral(elements.size());
      fill_neutral(dtype, reduction, neutral.data(), kCount);
      const CombineKernel combine = find_kernels(dtype, reduction).combine;
      std::vector<std::byte> left = neutral;
      combine(left.data(), elements.data(), kCount);
      CHECK(left == elements);
      std::vector<std::byte> right = elements;
      combine(right.data(), neutral.data(), kCount);
      CHECK(right == elements);
    }
  }
}

void test_names() {
  CHECK_EQ(name_of(SimdLevel::kBaseline), "baseline");
  CHECK_EQ(name_of(SimdLevel::kAvx2), "avx2");
  CHECK_EQ(name_of(SimdLevel::kAvx512), "avx512");
  CHECK(find_kernels(DType::kInt8, Reduction::kSum).combine ==
        find_kernels(DType::kInt8, Reduction::kSum, detect_simd_level()).combine);
}

}  // namespace
}  // namespace ringdl

int main() {
  ringdl::test_names();
  ringdl::test_neutral_elements();
  ringdl::test_examples();
  ringdl::test_edges();
  ringdl::test_divisors();
  ringdl::test_sizes_and_starts();
  ringdl::test_all_16_bit_floats();
  return ringdl::check::report();
}

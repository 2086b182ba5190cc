#include "reduce/adasum.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace ringdl {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kLanes = 8;  // sums side by side, so that the compiler may vectorize them
using Block = std::array<double, kBlock>;
using Lanes = std::array<double, kLanes>;

// Elements as float64, and back, a block at a time.
template <DType D>
struct Elements;

template <class T>
struct Plain {
  static void load(const void* from, int64_t begin, int64_t count, Block& block) {
    const T* const values = static_cast<const T*>(from) + begin;
    std::copy_n(values, count, block.begin());
  }
  static void store(void* into, int64_t begin, int64_t count, const Block& block) {
    T* const values = static_cast<T*>(into) + begin;
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(block[static_cast<size_t>(i)]);
  }
};
template <>
struct Elements<DType::kFloat64> : Plain<double> {};
template <>
struct Elements<DType::kFloat32> : Plain<float> {};

template <DType D>
struct Narrow {
  static void load(const void* from, int64_t begin, int64_t count, Block& block) {
    std::array<float, kBlock> wide;
    find_widening(D).widen(wide.data(), static_cast<const uint16_t*>(from) + begin,
                           static_cast<size_t>(count));
    std::copy_n(wide.begin(), count, block.begin());
  }
  static void store(void* into, int64_t begin, int64_t count, const Block& block) {
    std::array<float, kBlock> wide;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) wide[i] = static_cast<float>(block[i]);
    find_widening(D).narrow(static_cast<uint16_t*>(into) + begin, wide.data(),
                            static_cast<size_t>(count));
  }
};
template <>
struct Elements<DType::kFloat16> : Narrow<DType::kFloat16> {};
template <>
struct Elements<DType::kBFloat16> : Narrow<DType::kBFloat16> {};

double total(const Lanes& lanes) {
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <DType D>
void adasum(void* into, const void* from, int64_t count) {
  Lanes products{};
  Lanes left_squares{};
  Lanes right_squares{};
  Block left{};
  Block right{};
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t here = std::min(kBlock, count - begin);
    Elements<D>::load(into, begin, here, left);
    Elements<D>::load(from, begin, here, right);
    std::fill(left.begin() + here, left.end(), 0.0);
    std::fill(right.begin() + here, right.end(), 0.0);
    for (size_t i = 0; i < kBlock; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const double a = left[i + lane];
        const double b = right[i + lane];
        products[lane] += a * b;
        left_squares[lane] += a * a;
        right_squares[lane] += b * b;
      }
    }
  }
  const double product = total(products);
  const auto factor = [product](double square) {
    return square > 0 ? 1 - product / (2 * square) : 1.0;
  };
  const double left_factor = factor(total(left_squares));
  const double right_factor = factor(total(right_squares));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t here = std::min(kBlock, count - begin);
    Elements<D>::load(into, begin, here, left);
    Elements<D>::load(from, begin, here, right);
    for (size_t i = 0; i < kBlock; ++i) left[i] = left_factor * left[i] + right_factor * right[i];
    Elements<D>::store(into, begin, here, left);
  }
}

}  // namespace

CustomKernel find_adasum(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return &adasum<DType::kFloat64>;
    case DType::kFloat32:
      return &adasum<DType::kFloat32>;
    case DType::kFloat16:
      return &adasum<DType::kFloat16>;
    case DType::kBFloat16:
      return &adasum<DType::kBFloat16>;
    default:
      return nullptr;
  }
}

}  // namespace ringdl

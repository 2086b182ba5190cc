#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace ringdl::check {

/// Numbers from a seed.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  int64_t operator()(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine_);
  }
  bool is_one_of(int64_t count) { return (*this)(1, count) == 1; }
  template <class T>
  const T& choose(const std::vector<T>& from) {
    return from[static_cast<size_t>((*this)(0, static_cast<int64_t>(from.size()) - 1))];
  }
  /// Some of them, in their order.
  std::vector<int> some_of(std::vector<int> from, size_t count) {
    std::ranges::shuffle(from, engine_);
    from.resize(count);
    std::ranges::sort(from);
    return from;
  }

 private:
  std::mt19937_64 engine_;
};

inline std::vector<int> numbers_to(int count) {
  std::vector<int> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace ringdl::check

// What a collective combines payload with: the engine's kernels, or the user's own.

#include "reduce/reducer.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <array>
#include <bit>
#include <cstdint>

#include "check.h"

using namespace ringdl;

namespace {

using Numbers = std::array<int32_t, 4>;

std::byte* bytes_of(Numbers& numbers) { return reinterpret_cast<std::byte*>(numbers.data()); }

void weigh(void* into, const void* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    static_cast<int32_t*>(into)[i] += 100 * static_cast<const int32_t*>(from)[i];
  }
}

void engine_kernels_divide_in_the_end_only() {
  const Reducer reducer(DType::kInt32, Reduction::kAverage, 3);
  Numbers into = {1, 2, 3, 4};
  Numbers from = {5, 5, 5, 5};
  reducer.combine(bytes_of(into), bytes_of(from), 12);
  CHECK((into == Numbers{6, 7, 8, 4}));
  reducer.finish(bytes_of(into), bytes_of(from), 8);
  CHECK((into == Numbers{3, 4, 8, 4}));
}

void custom_kernel_is_all_there_is() {
  const Reducer reducer(DType::kInt32, weigh);
  CHECK_EQ(reducer.item_bytes(), size_t{4});
  Numbers into = {1, 2, 3, 4};
  Numbers from = {5, 6, 7, 8};
  reducer.combine(bytes_of(into), bytes_of(from), 12);
  CHECK((into == Numbers{501, 602, 703, 4}));
  reducer.finish(bytes_of(into), bytes_of(from), 8);
  CHECK((into == Numbers{1001, 1202, 703, 4}));
  reducer.finish(bytes_of(into), bytes_of(from), 0);
  CHECK((into == Numbers{1001, 1202, 703, 4}));
}

#if defined(__x86_64__)
// Ranks got different bits where the waiting thread flushed subnormals and the progress thread did
// not.
void programs_rounding_does_not_matter() {
  const unsigned saved = _mm_getcsr();
  const Reducer reducer(DType::kFloat64, Reduction::kSum, 1);
  const auto sum_of_small = [&] {
    double into = 1e-310;
    const double from = 2e-310;
    reducer.combine(reinterpret_cast<std::byte*>(&into), reinterpret_cast<const std::byte*>(&from),
                    sizeof into);
    reducer.finish(reinterpret_cast<std::byte*>(&into), reinterpret_cast<const std::byte*>(&from),
                   sizeof into);
    return std::bit_cast<uint64_t>(into);
  };
  const uint64_t expected = sum_of_small();
  CHECK(expected > std::bit_cast<uint64_t>(4e-310));
  for (const unsigned mode : {0x8000u, 0x0040u, 0x4000u}) {  // flush, subnormals are zeros, up
    _mm_setcsr(saved | mode);
    const uint64_t sum = sum_of_small();
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    CHECK_EQ(sum, expected);
    CHECK_EQ(after & mode, mode);
  }
}
#endif

}  // namespace

int main() {
#if defined(__x86_64__)
  programs_rounding_does_not_matter();
#endif
  engine_kernels_divide_in_the_end_only();
  custom_kernel_is_all_there_is();
  return check::report();
}

// What a collective combines payload with: the engine's kernels, or the user's own.

#include "collective/reducer.h"

#include <array>
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

}  // namespace

int main() {
  engine_kernels_divide_in_the_end_only();
  custom_kernel_is_all_there_is();
  return check::report();
}

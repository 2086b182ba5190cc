// Reducing many arrays in one pass, and copies past the caches.

#include "reduce/reduce_many.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "reduce/streaming.h"

using namespace ringdl;

namespace {

void test_stream_copy() {
  std::vector<std::byte> from(5000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7);
  for (const size_t begin : {0, 1, 63, 64}) {
    for (const size_t bytes : {0, 1, 63, 64, 65, 200, 4096, 4500}) {
      std::vector<std::byte> into(5000, std::byte{1});
      stream_copy(into.data() + begin, from.data() + 3, bytes);
      stream_fence();
      CHECK(std::memcmp(into.data() + begin, from.data() + 3, bytes) == 0);
      CHECK(begin == 0 || into[begin - 1] == std::byte{1});
      CHECK(into[begin + bytes] == std::byte{1});
    }
  }
}

// Wider than 16 bits: the same bits as one kernel after the other.
void test_join_is_the_kernels_in_order(bool streams) {
  std::mt19937_64 random(2);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kInt64, DType::kInt32,
                            DType::kInt16, DType::kInt8, DType::kUInt8, DType::kBool}) {
    for (int r = 0; r < kReductionCount; ++r) {
      const auto reduction = static_cast<Reduction>(r);
      if (!has_reduction(dtype, reduction)) continue;
      const Kernels kernels = find_kernels(dtype, reduction);
      for (const size_t count : {1, 3, 64, 1000, 5001}) {
        for (const size_t sources_count : {1, 2, 3, 5}) {
          const size_t bytes = count * item_bytes(dtype);
          std::vector<std::vector<std::byte>> arrays(sources_count,
                                                     std::vector<std::byte>(bytes + 8));
          std::vector<const std::byte*> sources;
          std::vector<std::byte*> targets;
          for (auto& array : arrays) {
            for (auto& byte : array) byte = static_cast<std::byte>(random());
            sources.push_back(array.data() + 8);
            targets.push_back(array.data() + 8);
          }
          std::vector<std::byte> elsewhere(bytes + 8);
          targets.push_back(elsewhere.data() + 8);
          if (count == 64) std::reverse(targets.begin(), targets.end());
          const bool is_first_kept = count == 1000;
          if (is_first_kept) targets.erase(targets.begin());
          const std::vector<std::byte> first = arrays[0];
          std::vector<std::byte> expected(sources[0], sources[0] + bytes);
          for (size_t i = 1; i < sources_count; ++i) {
            if (i + 1 < sources_count) {
              kernels.combine(expected.data(), sources[i], count);
            } else {
              kernels.finish(expected.data(), sources[i], count,
                             static_cast<int64_t>(sources_count));
            }
          }
          const ReduceMany reduce_many(dtype, reduction, static_cast<int64_t>(sources_count));
          reduce_many(sources, targets, bytes, streams);
          for (std::byte* const target : targets) {
            CHECK(std::memcmp(target, expected.data(), bytes) == 0);
          }
          CHECK(!is_first_kept || arrays[0] == first);
        }
      }
    }
  }
}

// 16 bits: a one and eight tiny numbers that rounding in between would lose.
void test_join_rounds_once(bool streams) {
  constexpr uint16_t kOne = 0x3f80;
  constexpr uint16_t kTiny = 0x3a80;  // 2^-10: half of the last bit of 1 is 2^-9
  for (const bool in_place : {false, true}) {
    std::vector<uint16_t> ones(700, kOne);  // more than one block
    std::vector<uint16_t> tinies(700, kTiny);
    const auto* one = reinterpret_cast<const std::byte*>(ones.data());
    const auto* tiny = reinterpret_cast<const std::byte*>(tinies.data());
    std::vector<const std::byte*> sources(9, tiny);
    sources[0] = one;
    std::vector<uint16_t> elsewhere(700);
    std::vector<uint16_t>& result = in_place ? ones : elsewhere;
    std::byte* const target = reinterpret_cast<std::byte*>(result.data());
    ReduceMany(DType::kBFloat16, Reduction::kSum, 9)(sources, {&target, 1}, 1400, streams);
    CHECK_EQ(result[0], 0x3f81);  // 1 + 8 * 2^-10 = 1 + 2^-7
    CHECK_EQ(result[699], 0x3f81);
  }
}

void test_widening_is_undone_by_narrowing() {
  for (int bits = 0; bits < 0x10000; ++bits) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const auto narrow = static_cast<uint16_t>(bits);
      uint16_t back = 0;
      float wide = 0;
      find_widening(dtype).widen(&wide, &narrow, 1);
      find_widening(dtype).narrow(&back, &wide, 1);
      const bool is_nan = std::isnan(wide);
      CHECK_EQ(back, is_nan ? (dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0) : narrow);
    }
  }
}

}  // namespace

int main() {
  test_stream_copy();
  for (const bool streams : {false, true}) {
    test_join_is_the_kernels_in_order(streams);
    test_join_rounds_once(streams);
  }
  test_widening_is_undone_by_narrowing();
  return check::report();
}

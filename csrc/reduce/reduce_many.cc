#include "reduce/reduce_many.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/rounding.h"
#include "reduce/streaming.h"

namespace ringdl {
namespace {

// A block of each array is reduced in the first-level cache, then written. For 16 MiB two ranks
// took 1.13 times as long with blocks of 2048 bytes, and 1.08 times with 512; for 64 MiB 1.02 with
// 512. With more arrays, blocks are half as long.
constexpr size_t kBlockBytes = 1024;

// How far ahead a stream of two arrays fetches what it writes in place. Processors fetch ahead,
// too, but only to read, and only to the end of a page. With this, two ranks took 0.93 of the time
// for 16 MiB, 0.91 and 1.07 in two runs of 64 MiB; where the arrays fit in the caches (4 MiB)
// nothing was gained. Not done for more arrays: with it and blocks of 1024 bytes, 64 MiB took four
// ranks 1.07 and eight ranks 1.18 times as long.
constexpr size_t kAheadBytes = 4096;

}  // namespace

ReduceMany::ReduceMany(DType dtype, Reduction reduction, int64_t divisor)
    : dtype_(dtype),
      reduction_(reduction),
      kernels_(find_kernels(dtype, reduction)),
      item_bytes_(ringdl::item_bytes(dtype)),
      divisor_(divisor) {
  const bool is_rounded = reduction != Reduction::kMin && reduction != Reduction::kMax;
  if (is_rounded && (dtype == DType::kFloat16 || dtype == DType::kBFloat16)) {
    kernels_ = find_kernels(DType::kFloat32, reduction);
    widening_ = find_widening(dtype);
  }
}

ReduceMany::ReduceMany(DType dtype, CustomKernel kernel)
    : dtype_(dtype), custom_(kernel), item_bytes_(ringdl::item_bytes(dtype)) {}

// If the first array is a target, the others are added to it in place: half the stores of a sum
// that is made elsewhere and then copied to two targets. For 4 to 64 MiB two ranks took 0.86 to
// 0.97 of the time, with blocks of 512 bytes in both. Of two arrays either may be the first: what
// is built in gives the same bits both ways.
void ReduceMany::operator()(std::span<const std::byte* const> given,
                            std::span<std::byte* const> targets, size_t bytes, bool streams) const {
  std::array<const std::byte*, 2> swapped;
  std::span<const std::byte* const> sources = given;
  const auto is_target = [targets](const std::byte* source) {
    return std::find(targets.begin(), targets.end(), source) != targets.end();
  };
  if (given.size() == 2 && custom_ == nullptr && !is_target(given[0]) && is_target(given[1])) {
    swapped = {given[1], given[0]};
    sources = swapped;
  }
  alignas(64) std::byte elsewhere[kBlockBytes];
  const size_t block_bytes = sources.size() > 2 ? kBlockBytes / 2 : kBlockBytes;
  const bool fetches = streams && sources.size() <= 2;
  const DefaultRounding rounding;
  const auto is_source = [sources](const std::byte* target) {
    return std::find(sources.begin(), sources.end(), target) != sources.end();
  };
  const auto first = std::find(targets.begin(), targets.end(), sources[0]);
  for (size_t begin = 0; begin < bytes; begin += block_bytes) {
    const size_t part = std::min(block_bytes, bytes - begin);
    const size_t ahead = begin + kAheadBytes;
    for (std::byte* const target : targets) {
      if (fetches && ahead + block_bytes <= bytes && is_source(target)) {
        fetch_to_write(target + ahead, block_bytes);
      }
    }
    std::byte* const block = first != targets.end() ? *first + begin : elsewhere;
    if (widening_.widen != nullptr) {
      reduce_widened(block, sources, begin, part);
    } else {
      reduce(block, sources, begin, part);
    }
    for (std::byte* const target : targets) {
      if (target + begin == block) continue;
      copy_bytes(target + begin, block, part, streams && !is_source(target));
    }
  }
  if (streams) stream_fence();
}

void ReduceMany::reduce(std::byte* block, std::span<const std::byte* const> sources, size_t begin,
                        size_t bytes) const {
  if (block != sources[0] + begin) std::memcpy(block, sources[0] + begin, bytes);
  const size_t count = bytes / item_bytes_;
  for (size_t i = 1; i < sources.size(); ++i) {
    const std::byte* const source = sources[i] + begin;
    if (custom_ != nullptr) {
      custom_(block, source, static_cast<int64_t>(count));
    } else if (i + 1 < sources.size()) {
      kernels_.combine(block, source, count);
    } else {
      kernels_.finish(block, source, count, divisor_);
    }
  }
}

void ReduceMany::reduce_widened(std::byte* block, std::span<const std::byte* const> sources,
                                size_t begin, size_t bytes) const {
  constexpr size_t most = kBlockBytes / 2;
  alignas(64) float sum[most];
  alignas(64) float next[most];
  const size_t count = bytes / 2;
  widening_.widen(sum, sources[0] + begin, count);
  for (size_t i = 1; i < sources.size(); ++i) {
    widening_.widen(next, sources[i] + begin, count);
    if (i + 1 < sources.size()) {
      kernels_.combine(sum, next, count);
    } else {
      kernels_.finish(sum, next, count, divisor_);
    }
  }
  widening_.narrow(block, sum, count);
}

}  // namespace ringdl

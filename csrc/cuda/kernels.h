#pragma once

// What kernels are given, by value. Also read by NVRTC, which has no headers: only the compiler's
// own types.
namespace ringdl::cuda {

/// Of one launch: with the other arguments they fit into the 4 KiB that any device lets one pass.
constexpr int kMostArrays = 64;

/// targets[t][i] = (sources[0][i] ∘ sources[1][i] ∘ ...) / divisor, as ReduceMany::operator().
struct ReduceArguments {
  const void* sources[kMostArrays];
  void* targets[kMostArrays];
  int source_count;
  int target_count;
  bool are_aligned;  // all arrays, to 16 bytes
  unsigned long long count;
  long long divisor;  // ignored unless the reduction is an average
};

/// One of the arrays that a launch packs.
struct PackedArray {
  const void* from;
  void* to;                        // null: elements are only counted
  unsigned long long count;        // of elements
  unsigned long long first_chunk;  // those before it have so many
};
/// Elements of an array that kPackThreads threads copy together.
constexpr unsigned long long kPackChunk = 8192;
constexpr unsigned long long kPackThreads = 256;
/// Of one launch, for the same reason.
constexpr int kMostPacked = 120;

/// to[i] = from[i] * scale in another floating dtype, or the same, for each of many arrays.
struct PackArguments {
  PackedArray arrays[kMostPacked];
  int array_count;
  unsigned long long chunks;  // of all
  double scale;
  unsigned long long* non_finite;  // how many results are not finite is added to it; may be null
};
static_assert(sizeof(ReduceArguments) <= 4096 && sizeof(PackArguments) <= 4096);

/// to[i] = from[i] in another floating dtype, as Codec::pack() and unpack().
struct ConvertArguments {
  const void* from;
  void* to;
  unsigned long long count;
};

}  // namespace ringdl::cuda

#pragma once

// Also read by compilers for devices, which may have no headers of the standard library.
namespace ringdl {

/// How elements of several ranks become one. The values travel in headers, so they never change.
enum class Reduction : unsigned char {
  kSum = 0,
  kAverage = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kBitAnd = 5,
  kBitOr = 6,
  kBitXor = 7,
};

}  // namespace ringdl

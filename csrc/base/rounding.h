#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace ringdl {

/// While it lives, the calling thread rounds to nearest and keeps subnormals, whatever the program
/// has set for itself (torch.set_flush_denormal): otherwise bits would depend on the thread that
/// happens to reduce.
class DefaultRounding {
 public:
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;
#if defined(__x86_64__)
  DefaultRounding() : saved_(_mm_getcsr()) {
    if ((saved_ & kDeviations) != 0) _mm_setcsr(saved_ & ~kDeviations);
  }
  ~DefaultRounding() {
    if ((saved_ & kDeviations) != 0) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kDeviations = 0xe040;  // flush to zero, rounding, subnormals are zeros
  const unsigned saved_;
#else
  DefaultRounding() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultRounding() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace ringdl

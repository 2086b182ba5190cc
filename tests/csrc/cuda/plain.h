#pragma once

#include <type_traits>

/// For comparing declarations of a library's with our own: handles and enumerations differ in name
/// only, so each function is compared after replacing theirs.
template <class T>
struct Plain {
  using type = T;
};
template <class R, class... Arguments>
struct Plain<R (*)(Arguments...)> {
  using type = typename Plain<R>::type (*)(typename Plain<Arguments>::type...);
};
/// Of theirs, which ours stands for.
#define IS(theirs, ours)  \
  template <>             \
  struct Plain<theirs> {  \
    using type = ours;    \
  };                      \
  template <>             \
  struct Plain<theirs*> { \
    using type = ours*;   \
  };                      \
  static_assert(sizeof(theirs) == sizeof(ours))

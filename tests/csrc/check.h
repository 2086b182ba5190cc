#pragma once

#include <cstdio>
#include <exception>
#include <mutex>
#include <sstream>
#include <string>

/// The few macros that the C++ tests need. A failed check is printed and counted and the test goes
/// on; checks may be made from several threads.
namespace ringdl::check {

inline std::mutex lock;
inline int failures = 0;
inline int checks = 0;

inline void record(bool passed, const char* file, int line, const std::string& what) {
  std::lock_guard guard(lock);
  ++checks;
  if (passed) return;
  ++failures;
  if (failures <= 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

inline int report() {
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace ringdl::check

#define CHECK(condition) \
  ::ringdl::check::record(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

#define CHECK_EQ(left, right)                                                           \
  do {                                                                                  \
    const auto left_value = (left);                                                     \
    const auto right_value = (right);                                                   \
    std::ostringstream text;                                                            \
    text << #left " == " #right " (" << left_value << " and " << right_value << ")";    \
    ::ringdl::check::record(left_value == right_value, __FILE__, __LINE__, text.str()); \
  } while (false)

/// Evaluates to true if `expression` throws `type` whose message contains `words`.
#define CHECK_THROWS(expression, type, words)                                             \
  do {                                                                                    \
    std::string thrown = "nothing";                                                       \
    bool matches = false;                                                                 \
    try {                                                                                 \
      expression;                                                                         \
    } catch (const type& error) {                                                         \
      thrown = error.what();                                                              \
      matches = thrown.find(words) != std::string::npos;                                  \
    } catch (const std::exception& error) {                                               \
      thrown = std::string("another error: ") + error.what();                             \
    }                                                                                     \
    ::ringdl::check::record(matches, __FILE__, __LINE__, #expression " threw " + thrown); \
  } while (false)

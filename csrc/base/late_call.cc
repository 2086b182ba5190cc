#include "base/late_call.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace ringdl {

LateCall::LateCall(std::string text, double late_after_seconds, std::string last_words,
                   double end_after_seconds, bool by_signal)
    : thread_([this, text = std::move(text), late_after_seconds, last_words = std::move(last_words),
               end_after_seconds, by_signal] {
        watch(text, late_after_seconds, last_words, end_after_seconds, by_signal);
      }) {}

LateCall::~LateCall() {
  {
    const std::lock_guard guard(mutex_);
    has_returned_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool LateCall::returns_within(double seconds) {
  constexpr double kYear = 3e7;  // no clock reaches as far as some settings
  const std::chrono::duration<double> allowed(std::min(seconds, kYear));
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, began_ + allowed, [this] { return has_returned_; });
}

void LateCall::watch(const std::string& text, double late_after_seconds,
                     const std::string& last_words, double end_after_seconds, bool by_signal) {
  if (late_after_seconds > 0 && late_after_seconds < end_after_seconds) {
    if (returns_within(late_after_seconds)) return;
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  if (returns_within(end_after_seconds)) return;
  std::fprintf(stderr, "%s\n", last_words.c_str());
  if (by_signal) kill(getpid(), SIGKILL);
  _exit(1);  // exit handlers would wait for the call
}

}  // namespace ringdl

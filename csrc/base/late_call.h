#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace ringdl {

/// Watches a call of another library that nothing can interrupt, such as MPI_Init, from its
/// constructor to its destructor: a thread that needs no interpreter's lock says on stderr that the
/// call is late, and ends the process if it does not return at all.
class LateCall {
 public:
  /// @param text  what is printed when the call is late
  /// @param late_after_seconds  0: it is never called late
  /// @param last_words  what is printed when the process is ended
  /// @param end_after_seconds  more than 0
  /// @param by_signal  it ends by SIGKILL, which some launchers tell the other ranks of, when they
  /// do not of other ends; else with status 1
  LateCall(std::string text, double late_after_seconds, std::string last_words,
           double end_after_seconds, bool by_signal = false);
  ~LateCall();
  LateCall(const LateCall&) = delete;
  LateCall& operator=(const LateCall&) = delete;

 private:
  /// Returns whether the call has returned before `seconds` have passed since it began.
  bool returns_within(double seconds);
  void watch(const std::string& text, double late_after_seconds, const std::string& last_words,
             double end_after_seconds, bool by_signal);

  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_returned_ = false;
  std::thread thread_;
};

}  // namespace ringdl

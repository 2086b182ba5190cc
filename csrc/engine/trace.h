#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ringdl {

/// What happened on this rank while it was recorded: works, and who waited for them. Under the
/// engine's lock.
class Trace {
 public:
  struct Event {
    std::string name;       // the work's
    std::string algorithm;  // how it was computed; empty: somebody has waited for it
    int64_t bytes = 0;      // of the array; 0: not known beforehand
    int64_t begin_ns = 0;   // of now_ns()
    int64_t end_ns = 0;
    int64_t thread = 0;  // that has waited, as the system numbers it
  };

  /// Later events are dropped: about 200 MB.
  static constexpr size_t kMostEvents = 1'000'000;

  bool is_on() const { return is_on_; }
  void start() {
    is_on_ = true;
    events_.clear();
  }
  std::vector<Event> stop() {
    is_on_ = false;
    return std::exchange(events_, {});
  }
  void add(Event event) {
    if (events_.size() < kMostEvents) events_.push_back(std::move(event));
  }

 private:
  bool is_on_ = false;
  std::vector<Event> events_;
};

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ringdl {

/// What happened on this rank while it was recorded: works, and the waits for them.
class Trace {
 public:
  struct Event {
    uint64_t work = 0;       // its id; waits have none
    std::string name;        // the work's
    std::string algorithm;   // how it was computed; empty: this is a wait for it
    int64_t bytes = 0;       // of the array; 0: not known beforehand
    int64_t begin_ns = 0;    // of the engine's clock
    int64_t end_ns = 0;      // 0: it is in flight
    int64_t thread = 0;      // the one that waited, by the system's number
    bool is_listed = false;  // its begin was taken while it was in flight
  };

  /// Later events are dropped: about 300 MB in the file.
  static constexpr size_t kMostEvents = 1'000'000;

  bool is_on() const { return is_on_; }
  void start() {
    *this = {};
    is_on_ = true;
  }
  std::vector<Event> stop() { return std::exchange(*this, {}).events_; }

  void add(Event event) {
    if (added_ == kMostEvents) return;
    ++added_;
    event.is_listed = !is_new(event.begin_ns);
    events_.push_back(std::move(event));
  }

  /// Whether a work in flight has begun since the last take(): its begin is added then, which shows
  /// what a job was doing when it was killed.
  bool is_new(int64_t begin_ns) const { return begin_ns >= taken_ns_; }

  /// What has been added since the last call.
  std::vector<Event> take(int64_t now_ns) {
    taken_ns_ = now_ns;
    return std::exchange(events_, {});
  }

 private:
  bool is_on_ = false;
  size_t added_ = 0;  // since start()
  int64_t taken_ns_ = 0;
  std::vector<Event> events_;
};

/// Events as Perfetto reads them: objects of JSON with commas between them, times in microseconds.
///
/// @param rank      whose they are; shown as a process
/// @param origin_ns  of the engine's clock, from which times are counted
std::string json_of(const std::vector<Trace::Event>& events, int rank, int64_t origin_ns);

}  // namespace ringdl

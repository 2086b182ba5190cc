#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/diagnosis.h"
#include "engine/work.h"

namespace ringdl {

/// Tells on stderr which works have been in flight for long, and which ranks they and shutdown()
/// wait for.
///
/// Each rank that has such a work has the members of its group counted that have submitted it; the
/// lowest one that has is the one that prints. A work is told of again each time that it has become
/// twice as old.
class Watchdog {
 public:
  using Works = std::unordered_map<Key, std::shared_ptr<Work>, KeyHash>;

  Watchdog(Diagnosis& diagnosis, int rank) : diagnosis_(diagnosis), rank_(rank) {}

  /// @param after_ns  how old a work must be; 0: none is told of
  void set_after(int64_t after_ns) { after_ns_ = after_ns; }

  /// Called now and then. Returns what there is to print, mostly nothing.
  std::string look(const Works& works, int64_t now_ns);

  /// The same of shutdown().
  /// @param awaited  what it waits for; empty: another rank tells of it
  std::string look_at_shutdown(const std::string& awaited, int64_t now_ns);

  /// Whether this rank has had an old work since the last call.
  bool take_alarm() { return std::exchange(alarm_, false); }

 private:
  struct Watched {
    uint32_t question = 0;  // 0: nothing is asked
    int64_t ask_at_ns = 0;
  };

  Diagnosis& diagnosis_;
  const int rank_;
  int64_t after_ns_ = 0;
  int64_t next_look_ns_ = 0;
  int64_t shutdown_since_ns_ = 0;  // 0: not begun
  int64_t tell_shutdown_at_ns_ = 0;
  bool alarm_ = false;
  std::unordered_map<uint64_t, Watched> watched_;  // by the work's id
};

}  // namespace ringdl

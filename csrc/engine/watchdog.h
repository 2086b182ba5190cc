#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/diagnosis.h"
#include "engine/work.h"

namespace ringdl {

/// Reports on stderr which works have been in flight for long, and which ranks they and shutdown()
/// wait for.
///
/// Each rank that has such a work counts the members of its group that have submitted it; the
/// lowest of these prints. A work is reported again each time its age has doubled.
class Watchdog {
 public:
  using Works = std::unordered_map<Key, std::shared_ptr<Work>, KeyHash>;

  Watchdog(Diagnosis& diagnosis, int rank) : diagnosis_(diagnosis), rank_(rank) {}

  /// @param after_ns  how old a work must be; 0: none is reported
  /// @param dumps  whether all works in flight are printed, too, when one is reported
  void set_after(int64_t after_ns, bool dumps) {
    after_ns_ = after_ns;
    dumps_ = dumps;
  }

  /// Called now and then. Returns what there is to print, mostly nothing.
  std::string check(const Works& works, int64_t now_ns);

  /// The same for shutdown().
  /// @param awaited  what it waits for; empty: another rank reports it
  std::string check_shutdown(const std::string& awaited, int64_t now_ns);

  /// Whether all works in flight are to be printed: this rank has had an old one since the last
  /// call.
  bool take_alarm() { return std::exchange(alarm_, false) && dumps_; }

 private:
  struct Watched {
    uint32_t question = 0;  // 0: nothing is asked
    int64_t ask_at_ns = 0;
  };

  Diagnosis& diagnosis_;
  const int rank_;
  int64_t after_ns_ = 0;
  int64_t next_check_ns_ = 0;
  int64_t shutdown_since_ns_ = 0;  // 0: not begun
  int64_t warn_of_shutdown_at_ns_ = 0;
  bool alarm_ = false;
  bool dumps_ = false;
  std::unordered_map<uint64_t, Watched> watched_;  // by the work's id
};

}  // namespace ringdl

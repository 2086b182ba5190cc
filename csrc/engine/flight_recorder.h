#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/group.h"
#include "engine/wire.h"

namespace ringdl {

/// The last works that this rank has begun, in memory that outlives the process if it is a file's:
/// who reads it afterwards, or while nothing moves, sees which ranks called what.
///
/// Of fixed size, so that a rank that is killed at any moment leaves what it has begun: a header,
/// and a ring of flights, each with its number, which is 0 while the flight is written. One that is
/// in flight keeps its place, unless all of them are.
class FlightRecorder {
 public:
  static constexpr size_t kMost = 1000;  // flights; later ones take the place of the oldest

  /// Of the memory.
  static size_t bytes();

  struct Owner {
    int rank;
    int size;
    int64_t process;
    int64_t unix_ns;  // the time of day
    std::string_view host;
    std::string_view version;
    bool has_thread;  // that polls the engine, so that see() is called ten times a second
  };
  /// From now on works are recorded.
  /// @param memory  zeros, aligned to 8 bytes; outlives this, or stop()
  void start(std::byte* memory, const Owner& owner, int64_t now_ns);
  bool is_on() const { return header_ != nullptr; }

  /// A work has begun.
  /// @param is_alone  no other rank begins it under this key: a receive that names no sender
  /// @returns  what the others take; 0 if nothing is recorded
  uint64_t begin(const Key& key, const Description& description, const Group& group, int64_t now_ns,
                 bool is_alone = false);
  /// @param why  it has failed
  void end(uint64_t flight, int64_t now_ns, std::string_view why = {});
  /// Threads that wait for it: one more, or one less.
  void wait_begins(uint64_t flight, int64_t now_ns);
  void wait_ends(uint64_t flight);
  /// What was found out of a work that stays in flight.
  void note(uint64_t flight, std::string_view what);

  /// The process is alive.
  void see(int64_t now_ns);
  /// It waits in shutdown().
  void leave();
  /// The process ends by an error.
  void note_end(std::string_view why);
  /// Nothing more is recorded.
  /// @param is_regular  all ranks have shut down
  void stop(bool is_regular);

  /// What a memory holds, as an object of JSON. Times are in seconds since 1970.
  ///
  ///     {"rank", "size", "process", "host", "version", "begin", "seen", "has_thread",
  ///      "state",  "running", "shutting down" or "shut down"
  ///      "why",    by what error it ends; null: by none
  ///      "begun",  the number of works since the start
  ///      "overwritten",  how many of those are in flight, and not among the following ones
  ///      "works": [{"number", "key", "instance", "label", "kind", "dtype", "compression",
  ///                 "reduction", "memory", "shape", "root",
  ///                 "ranks",  null: all of them; []: they are not known
  ///                 "begin", "end", "waited_since", "why"}, ...]}  null: not (yet)
  ///
  /// @throws UsageError  it is none, or another version's
  static std::string json_of(std::string_view memory);

 private:
  struct Header;
  struct Flight;
  enum State : uint8_t { kRunning, kShuttingDown, kShutDown };
  Flight* find(uint64_t flight) const;
  size_t free_place() const;
  static bool is_whole(const Flight& flight);

  Header* header_ = nullptr;
  Flight* flights_ = nullptr;
  mutable size_t place_ = kMost - 1;  // that was taken last
};

}  // namespace ringdl

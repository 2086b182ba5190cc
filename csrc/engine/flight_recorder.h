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
/// and a ring of flights, each with its number, which is 0 while the flight is written.
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
  };
  /// From now on works are recorded.
  /// @param memory  zeros, aligned to 8 bytes; outlives this, or stop()
  void start(std::byte* memory, const Owner& owner, int64_t now_ns);
  bool is_on() const { return header_ != nullptr; }

  /// A work has begun.
  /// @returns  its number; 0 if nothing is recorded, which the others take, too
  uint64_t begin(const Key& key, const Description& description, const Group& group,
                 int64_t now_ns);
  /// @param why  it has failed
  void end(uint64_t number, int64_t now_ns, std::string_view why = {});
  /// Threads that wait for it: one more, or one less.
  void wait_begins(uint64_t number, int64_t now_ns);
  void wait_ends(uint64_t number);
  /// What was found out of a work that stays in flight.
  void note(uint64_t number, std::string_view what);

  /// The process is alive.
  void see(int64_t now_ns);
  /// The process ends by an error.
  void note_end(std::string_view why);
  /// Nothing more is recorded.
  /// @param is_regular  all ranks have shut down
  void stop(bool is_regular);

  /// What a memory holds, as an object of JSON. Times are in seconds since 1970.
  ///
  ///     {"rank", "size", "process", "host", "version", "begin", "seen", "has_shut_down", "why",
  ///      "begun",  the number of works since the start
  ///      "works": [{"number", "key", "instance", "label", "kind", "dtype", "reduction", "memory",
  ///                 "algorithm", "shape", "root", "ranks",  null: all of them
  ///                 "begin", "end", "waited_since", "why"}, ...]}  null: not (yet)
  ///
  /// @throws UsageError  it is none, or another version's
  static std::string json_of(std::string_view memory);

 private:
  struct Header;
  struct Flight;
  Flight* find(uint64_t number) const;
  static bool is_whole(const Flight& flight);

  Header* header_ = nullptr;
  Flight* flights_ = nullptr;
};

}  // namespace ringdl

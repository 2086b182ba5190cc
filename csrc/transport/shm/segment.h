#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ringdl {

/// Memory that other processes of this user on this host can map. Pages exist once they are
/// touched, so it may be as large as the machine's memory. It has no name in any file system: it
/// disappears with the last process that holds it, however that ends. It is no part of core dumps.
class Segment {
 public:
  /// What another process needs in order to map it.
  struct Address {
    int64_t process;
    int64_t descriptor;
    uint64_t bytes;
    uint64_t nonce;  // what it begins with
  };

  /// Makes a new one, all zeros except the nonce.
  /// @throws Error  the system refuses
  static std::shared_ptr<Segment> create(size_t bytes);

  /// Maps another process's segment; for one of this process, returns the very same object. Null if
  /// that is not possible, or something else is there by now.
  static std::shared_ptr<Segment> open(const Address& address);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  Address address() const;

  /// Whether the process that made it has ended, and no other process has its number by now.
  bool is_orphaned() const;

  /// Gives the whole pages of a range back to the system: they read as zeros afterwards, in all
  /// processes. Own segments only. MPI libraries notice it in this process only, so no other
  /// process may have sent from there, or received.
  void discard(uint64_t begin, uint64_t end) const;

  /// Allocates all missing pages of a range; whether that was possible. Where the system promises
  /// no more memory than it has, touching a page that it cannot provide ends the process.
  bool reserve(uint64_t begin, uint64_t end) const;

 private:
  Segment(int64_t process, int descriptor, size_t bytes, std::byte* data)
      : process_(process), descriptor_(descriptor), bytes_(bytes), data_(data) {}

  const int64_t process_;
  const int descriptor_;  // -1: another process's
  const size_t bytes_;
  std::byte* const data_;
};

}  // namespace ringdl

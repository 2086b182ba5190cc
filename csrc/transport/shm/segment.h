#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ringdl {

/// Memory that other processes of this user on this host can map. Pages exist once they are
/// touched, so it may be as large as the machine's memory. It has no name in any file system: it
/// goes with the last process that holds it, whatever way that ends. It is no part of core dumps.
class Segment {
 public:
  /// What another process needs in order to map it.
  struct Address {
    int64_t process;
    int64_t descriptor;
    uint64_t bytes;
    uint64_t nonce;  // what it begins with
  };

  /// A new one, all zeros but for the nonce.
  /// @throws Error  the system refuses
  static std::shared_ptr<Segment> create(size_t bytes);

  /// Maps another process's; within this process, the very same object. Null if that is not
  /// possible, or something else is there by now.
  static std::shared_ptr<Segment> open(const Address& address);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  Address address() const;

  /// Whether the process that made it has ended, its parent knows, and its number is not another's
  /// by now. One system call.
  bool is_orphaned() const;

  /// Gives the whole pages of a range back to the system: they read as zeros afterwards, in all
  /// processes. Own segments only. MPI libraries hear of it in this process, so only this one may
  /// have sent from there, or received.
  void discard(uint64_t begin, uint64_t end) const;

  /// Allocates all pages of a range that are not there; whether that was possible. Where the system
  /// promises no more memory than it has, touching one that cannot be had ends the process.
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

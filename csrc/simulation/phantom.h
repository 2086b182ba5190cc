#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

#include "base/error.h"

namespace ringdl {

/// Addresses for arrays that have a size and no content that counts: all simulated ranks may have
/// theirs there. Only what travels in headers is written, so few pages take memory.
class PhantomMemory {
 public:
  explicit PhantomMemory(size_t bytes) : bytes_(bytes) {
    at_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
               -1, 0);
    if (at_ == MAP_FAILED) throw OutOfMemory("no addresses are left for simulated arrays");
  }
  ~PhantomMemory() { munmap(at_, bytes_); }
  PhantomMemory(const PhantomMemory&) = delete;
  PhantomMemory& operator=(const PhantomMemory&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(at_), bytes_}; }
  void* data() const { return at_; }

 private:
  void* at_;
  const size_t bytes_;
};

}  // namespace ringdl

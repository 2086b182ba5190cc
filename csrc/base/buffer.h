#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringdl {

/// Large blocks that every collective allocates and frees. They are mapped, and kept for the next
/// request of their size: on the heap they would land between a framework's gradients, and the
/// holes that these leave would fit no gradient any more.
///
/// Threads: any. A forked child keeps nothing: a thread of its parent may have held the lock at the
/// fork, so it stays locked.
class BlockCache {
 public:
  static constexpr size_t kSmallestBytes = 256 << 10;
  static constexpr size_t kKeptBytes = 8 << 20;
  /// Blocks from this size on use huge pages where the system has them, as in NumPy: without them,
  /// the first touch of a new block takes several times as long as copying into it.
  static constexpr size_t kHugeBytes = 4 << 20;

  /// The cache of this process; it lives as long as the process.
  static BlockCache& instance() {
    static auto* const cache = new BlockCache;
    return *cache;
  }

  /// @throws OutOfMemory
  std::byte* take(size_t bytes) {
    if (getpid() == process_) {
      const std::lock_guard guard(mutex_);
      const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                      [bytes](const Kept& block) { return block.bytes == bytes; });
      if (found != kept_.rend()) {
        std::byte* const data = found->data;
        kept_.erase(std::next(found).base());
        kept_bytes_ -= bytes;
        return data;
      }
    }
    void* const data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw no_memory(bytes);
    if (bytes >= kHugeBytes) madvise(data, bytes, MADV_HUGEPAGE);  // fails where there are none
    return static_cast<std::byte*>(data);
  }

  /// Evicts the blocks that were given back first: programs move on to other sizes.
  void give_back(std::byte* data, size_t bytes) {
    if (getpid() != process_ || bytes > kKeptBytes) {
      munmap(data, bytes);
      return;
    }
    const std::lock_guard guard(mutex_);
    kept_.push_back({data, bytes});
    kept_bytes_ += bytes;
    while (kept_bytes_ > kKeptBytes) {
      munmap(kept_.front().data, kept_.front().bytes);
      kept_bytes_ -= kept_.front().bytes;
      kept_.pop_front();
    }
  }

  static OutOfMemory no_memory(size_t bytes) {
    return OutOfMemory("the system has no " + std::to_string(bytes) +
                       " bytes of memory more for this process: use smaller arrays or fewer ranks "
                       "on a host, or raise its limit (ulimit -v)");
  }

 private:
  const pid_t process_ = getpid();
  std::mutex mutex_;
  struct Kept {
    std::byte* data;
    size_t bytes;
  };
  std::list<Kept> kept_;  // the first is the oldest
  size_t kept_bytes_ = 0;
};

/// Memory that begins at a multiple of 64 bytes (a cache line and the widest vector). Owns it.
class Buffer {
 public:
  Buffer() = default;
  /// @throws OutOfMemory
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    if (rounded == 0) return;
    if (rounded >= BlockCache::kSmallestBytes) {
      data_ = {BlockCache::instance().take(rounded), Free{rounded}};
      return;
    }
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
    if (!data_) throw BlockCache::no_memory(bytes);
  }

  Buffer(Buffer&& other) noexcept
      : data_(std::move(other.data_)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    data_ = std::move(other.data_);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    Free() : mapped_bytes(0) {}
    explicit Free(size_t bytes) : mapped_bytes(bytes) {}
    void operator()(std::byte* data) const {
      if (mapped_bytes > 0) {
        BlockCache::instance().give_back(data, mapped_bytes);
      } else {
        std::free(data);
      }
    }
    size_t mapped_bytes;  // 0: from the heap
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

/// The same, with shared ownership.
inline std::shared_ptr<std::byte> allocate(size_t bytes) {
  const auto buffer = std::make_shared<Buffer>(bytes);
  return {buffer, buffer->data()};
}

}  // namespace ringdl

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "reduce/executor.h"

namespace ringdl::cuda {

/// Memory of devices that other ranks of this host reach: blocks whose handles they are given. The
/// driver must not free a block that is mapped elsewhere, so free blocks are kept for the next
/// arrays of about their size, to the end. Those that nobody was told of are freed when the device
/// has no room for another one.
///
/// Threads: any. Hold it by a shared pointer; what it has handed out keeps it.
class SharedBlocks : public std::enable_shared_from_this<SharedBlocks> {
 public:
  /// For whom a block is. When a caller's is free, streams that nobody here knows may still use it:
  /// it is waited for before it is used again.
  enum class Use { kCaller, kExecutor };

  /// @throws OutOfMemory, DeviceError
  std::shared_ptr<std::byte> take(Device& device, size_t bytes, Use use);

  /// See DeviceExecutors::place_of().
  DevicePlace place_of(const std::byte* data, size_t bytes);

 private:
  struct Block {
    Device* device;
    std::shared_ptr<std::byte> memory;
    size_t bytes;
    DevicePlace place;  // of its beginning
    bool is_free;
    bool may_be_used;  // by a stream of a caller's
    bool is_told;      // place_of() has named it
  };

  Block make_block_somehow(Device& device, size_t bytes);
  static Block make_block(Device& device, size_t bytes);
  void give_back(std::byte* begin);

  std::mutex mutex_;
  std::map<std::byte*, Block> blocks_;  // by where they begin
};

/// What this process has reached of other ranks' blocks. Threads: one at a time.
class ReachedBlocks {
 public:
  /// See DeviceExecutors::reached().
  std::byte* reach(Device& device, const DevicePlace& place);
  void let_go() { blocks_.clear(); }

 private:
  using Key = std::pair<int, DevicePlace>;  // of the device from where, and of a block

  std::map<Key, std::shared_ptr<std::byte>> blocks_;  // null: it cannot be reached
};

}  // namespace ringdl::cuda

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"

namespace ringdl::cuda {

using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;

/// Memory of the host that is pinned, so that devices copy it by themselves, at a multiple of the
/// page. What the driver refuses to pin is handed out as it is: copies then occupy the thread that
/// asks for them.
/// @throws what `allocate` throws
std::shared_ptr<std::byte> pin(const Device& device, size_t bytes, const Allocate& allocate);

/// Pinned memory for a short time. Pinning takes longer than a copy, so pieces are kept, by powers
/// of two, up to a bound.
///
/// Threads: any. Hold it by a shared pointer; what it has handed out may outlive it.
class StagePool : public std::enable_shared_from_this<StagePool> {
 public:
  /// Larger pieces than are kept are pinned each time.
  /// @throws what `allocate` throws
  std::shared_ptr<std::byte> take(const Device& device, size_t bytes, const Allocate& allocate);

 private:
  struct Piece {
    std::shared_ptr<std::byte> memory;
    size_t bytes = 0;
  };

  void give_back(Piece piece);

  std::mutex mutex_;
  std::vector<Piece> free_;
  size_t free_bytes_ = 0;
};

}  // namespace ringdl::cuda

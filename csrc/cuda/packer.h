#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "cuda/device.h"
#include "reduce/executor.h"

namespace ringdl::cuda {

/// Packs by one launch: a table of the arrays is copied to the device before it, in the same
/// stream.
class DevicePacker final : public Packer {
 public:
  /// @throws OutOfMemory, DeviceError
  DevicePacker(Device& device, size_t most_items);

  void start_over() override { used_ = 0; }
  void pack(void* stream, DType from, DType to, std::span<const Item> items, double scale) override;

 private:
  Device& device_;
  const size_t most_items_;
  size_t used_ = 0;                    // items of the table
  std::shared_ptr<std::byte> pinned_;  // what is copied
  std::shared_ptr<std::byte> table_;   // on the device
};

}  // namespace ringdl::cuda

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bucket/plan.h"
#include "engine/driver.h"

namespace ringdl {

/// The gradients of one rank's buckets on a device, in one piece of memory that is zero at first;
/// and those of other ranks of the host, on that device or another, as far as it reaches them.
class DeviceGradients {
 public:
  /// @throws UsageError, OutOfMemory
  DeviceGradients(Driver& driver, const BucketPlan& plan, int device);

  /// A bucket, its gradients and then its flags; keeps all of the memory.
  std::shared_ptr<std::byte> bucket(size_t number) const {
    return {memory_, memory_.get() + begins_[number]};
  }

  /// Where it lies, for the other ranks of the host: a DevicePlace's numbers.
  std::vector<int64_t> place() const;
  /// Whether it reaches those of all ranks, whose places are given, itself among them.
  bool reach(std::span<const std::vector<int64_t>> places);
  /// A bucket of all that were reached, in their order.
  std::vector<std::byte*> buckets(size_t number) const;

 private:
  Driver& driver_;
  const int device_;
  std::vector<size_t> begins_;  // of buckets
  size_t bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
  std::vector<std::byte*> reached_;  // of each rank
};

}  // namespace ringdl

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bucket/plan.h"
#include "bucket/storage.h"
#include "collective/shared/shared_counters.h"
#include "engine/bucket_table.h"
#include "engine/device_gradients.h"
#include "engine/driver.h"

namespace ringdl {

/// The memory of one rank's buckets: shared with the other members on its host, if there are any,
/// else ordinary. The first member on each host also has counters for each bucket.
///
/// Gradients may lie on a device. Where all members reach one another's there, or another library
/// (NCCL) reduces them, that happens there, and only their flags are here. Else buckets are here,
/// too, and what is reduced is copied to and fro, in memory from which the device copies by itself
/// (DeviceExecutors::pinned()).
///
/// To be made: the constructor; on a device library_member() and why_no_library() of all, else
/// place_on_device(), and reach() if that is not empty; settle(); places(); connect() for each
/// bucket.
class BucketMemory {
 public:
  /// By member: what its place_on_device() or places() is.
  using ByMember = std::vector<std::vector<int64_t>>;

  /// @param where  the gradients lie
  /// @throws UsageError, OutOfMemory  of a device
  BucketMemory(Driver& driver, const BucketPlan& plan, SharedGroup group, Memory where = {});
  ~BucketMemory();
  BucketMemory(const BucketMemory&) = delete;
  BucketMemory& operator=(const BucketMemory&) = delete;

  using Way = BucketOnDevice::Way;

  /// See Driver::library_member(). In the CPU's memory nothing.
  std::optional<DeviceLibrary::Member> library_member() const;
  /// Where the gradients lie on this rank's device, for the others. Empty, on all members, if
  /// gradients lie in the CPU's memory or members are on several hosts.
  std::vector<int64_t> place_on_device() const;
  /// Whether this rank reaches the gradients of all.
  bool reach(const ByMember& places);
  /// Allocates what the rest needs.
  /// @param way  of all members: kDirect if all have reached all, kByLibrary if all can
  void settle(Way way);

  /// Where this rank's buckets and counters are: two offsets per bucket in its shared memory, -1
  /// for what is not there. Empty, on all members, if no two of them share memory.
  const std::vector<int64_t>& places() const { return places_; }
  /// The bucket `number` of all members on this host. None, on all members, if some member does not
  /// reach that of another one on its host, or need not.
  std::optional<SharedArrays> connect(size_t number, const ByMember& places);

  BucketStorage& storage() { return *storage_; }
  Memory where() const { return where_; }
  /// As settled; where there is nobody else, there.
  Way way() const { return way_; }
  /// Where gradient `index` lies.
  std::byte* gradient(int index);
  /// Keeps the bucket `number` of this rank, where it is reduced.
  std::shared_ptr<std::byte> bucket(size_t number) const;
  std::optional<BucketOnDevice> on_device(size_t number) const;
  /// Of the next instance of a bucket on a device; null in the CPU's memory.
  Arrival* arrival(size_t number) const { return arrivals_[number].get(); }

  /// This rank does not use the bucket any more; others on its host may still do so.
  void leave(size_t number);
  /// Nothing is freed, not even by the destructor.
  void keep_for_good();

 private:
  int64_t place_of(const std::byte* data) const;
  bool is_reached(size_t number, const ByMember& places) const;
  std::shared_ptr<std::byte> allocate_here(size_t bytes) const;

  Driver& driver_;
  const BucketPlan plan_;
  const SharedGroup group_;
  const SharedLayout layout_;
  const bool shares_;                     // some members share memory
  const std::shared_ptr<Window> window_;  // null if this rank shares none
  const Memory where_;
  std::unique_ptr<DeviceGradients> gradients_;  // null in the CPU's memory
  std::vector<std::shared_ptr<Arrival>> arrivals_;
  Way way_ = Way::kHere;
  std::shared_ptr<BucketStorage> storage_;
  std::vector<int64_t> places_;
  std::vector<std::shared_ptr<std::byte>> own_counters_;  // of the first member; by bucket
  std::vector<SharedCounters> counters_;                  // in use, by bucket
  bool is_connected_ = false;
};

}  // namespace ringdl

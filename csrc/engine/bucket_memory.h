#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bucket/plan.h"
#include "bucket/storage.h"
#include "collective/shared/shared_counters.h"
#include "engine/driver.h"

namespace ringdl {

/// The memory of one rank's buckets: shared with the other members on its host, if there are any,
/// else ordinary. The first member on each host also has counters for each bucket.
class BucketMemory {
 public:
  /// By member: what its places() are.
  using Places = std::vector<std::vector<int64_t>>;

  BucketMemory(Driver& driver, const BucketPlan& plan, SharedGroup group);
  ~BucketMemory();
  BucketMemory(const BucketMemory&) = delete;
  BucketMemory& operator=(const BucketMemory&) = delete;

  /// Where this rank's buckets and counters are: two offsets per bucket in its shared memory, -1
  /// for what is not there. Empty, on all members, if no two of them share memory.
  const std::vector<int64_t>& places() const { return places_; }
  const std::shared_ptr<BucketStorage>& storage() const { return storage_; }

  /// The bucket `number` of all members on this host. None, on all members, if some member does not
  /// reach that of another one on its host.
  std::optional<SharedArrays> connect(size_t number, const Places& places);
  /// This rank does not use the bucket any more; others on its host may still do so.
  void leave(size_t number);
  /// Nothing is freed, not even by the destructor.
  void keep_for_good();

 private:
  int64_t place_of(const std::byte* data) const;
  bool is_reached(size_t number, const Places& places) const;

  const SharedGroup group_;
  const SharedLayout layout_;
  const bool shares_;                     // some members share memory
  const std::shared_ptr<Window> window_;  // null if this rank shares none
  const std::shared_ptr<BucketStorage> storage_;
  std::vector<int64_t> places_;
  std::vector<std::shared_ptr<std::byte>> own_counters_;  // of the first member; by bucket
  std::vector<SharedCounters> counters_;                  // in use, by bucket
  bool is_connected_ = false;
};

}  // namespace ringdl

#include "engine/planning.h"

#include <cstring>
#include <string>

#include "base/buffer.h"
#include "base/error.h"
#include "collective/planner/algorithms.h"
#include "engine/bucket_table.h"
#include "engine/make_collective.h"
#include "engine/make_on_device.h"
#include "reduce/neutral.h"
#include "transport/transport.h"

namespace ringdl {

void Planning::choose_by(const CostModel& costs, std::optional<Algorithm> wanted,
                         size_t library_bytes) {
  const bool is_library = wanted == Algorithm::kNccl;
  table_.costs = costs;
  table_.wanted = is_library ? std::nullopt : wanted;
  library_bytes_ = is_library ? 0 : library_bytes;
}

bool Planning::chooses_library(DType dtype, Reduction reduction, size_t bytes,
                               const Group& group) const {
  return devices_ && bytes >= library_bytes_ && group.is_all() && group.size() > 1 &&
         devices_->library_reduces(dtype, reduction);
}

void Planning::set_segment_bytes(size_t bytes) {
  if (bytes == 0 || bytes > Transport::kMaxMessageBytes) {
    throw UsageError("segment_bytes must be between 1 and 2^30, not " + std::to_string(bytes));
  }
  table_.segment_bytes = bytes;
}

Plan Planning::plan(const Call& call, const Group& group, bool may_use_slots) const {
  const bool is_for_library = call.memory.is_on_device() && call.operation.digest == 0 &&
                              chooses_library(call.dtype, call.reduction, bytes_of(call), group);
  if (!call.algorithm && is_for_library) return {Meeting::kHeaders, Algorithm::kNccl};
  return plan_without_library(call, group, may_use_slots);
}

Plan Planning::plan_without_library(const Call& call, const Group& group,
                                    bool may_use_slots) const {
  const SharedLayout layout = hosts_.layout_of(group);
  if (!call.memory.is_on_device()) {
    return plan_allreduce({bytes_of(call), call.algorithm, may_use_slots}, *layout, table_);
  }
  // Devices are far faster than anything in the host's memory.
  AllreduceRequest request{bytes_of(call), call.algorithm, false};
  const bool is_one_host = layout->host_count() == 1 && layout->size() > 1;
  if (is_one_host && !table_.wanted && !call.algorithm) request.algorithm = Algorithm::kDirect;
  return plan_allreduce(request, *layout, table_);
}

std::unique_ptr<Collective> Planning::make(const Call& call, const Description& description,
                                           void* data, const Group& group,
                                           const SlotCall* slot_call) const {
  const SharedLayout layout = hosts_.layout_of(group);
  const bool shares_memory = layout->hosts.size() < group.ranks.size();
  const Surroundings its{executor_, table_.segment_bytes, shares_memory ? hosts_.window() : nullptr,
                         layout, slot_call};
  if (!call.memory.is_on_device()) return make_collective(its, call, description, data, group);
  if (!devices_) {
    throw UsageError(
        "the array lies on a device, and these ranks reduce arrays in the CPU's memory only; copy "
        "it there first");
  }
  last_device_ = call.memory.device;
  if (call.kind == Kind::kAllreduce && description.algorithm == Algorithm::kNccl) {
    Call other = call;
    other.algorithm.reset();
    Description otherwise = description;
    otherwise.algorithm = plan_without_library(other, group, false).algorithm;
    return make_by_library(*devices_, slab_bytes_, its, call, otherwise, data, group);
  }
  return make_on_device(*devices_, slab_bytes_, its, call, description, data, group);
}

std::unique_ptr<Collective> Planning::make(const BucketSpec& bucket, uint64_t instance) const {
  const auto& on_device = bucket.on_device;
  if (on_device && on_device->way == BucketOnDevice::Way::kByLibrary) {
    return make_on_device(*devices_, bucket, make_by_library(*devices_, bucket));
  }
  const Group& group = *bucket.group;
  const SharedLayout layout = hosts_.layout_of(group);
  const Plan plan = plan_bucket(bucket.bytes, bucket.shared.has_value(), *layout, table_);
  const bool is_reduced_there = on_device && on_device->way == BucketOnDevice::Way::kDirect;
  auto made = algorithm_of(plan.algorithm)
                  .make({.executor = is_reduced_there ? devices_->of(on_device->device) : executor_,
                         .data = static_cast<std::byte*>(bucket.data),
                         .bytes = bucket.bytes,
                         .reducer = Reducer(bucket.dtype, bucket.reduction, group.size()),
                         .reduce_many = over_host(bucket.dtype, bucket.reduction, *layout),
                         .codec = bucket.codec,
                         .segment_bytes = table_.segment_bytes,
                         .rank = group.rank,
                         .size = group.size(),
                         .ranks = group.ranks,
                         .window = hosts_.window(),
                         .layout = layout,
                         .agreed = bucket.shared ? &*bucket.shared : nullptr,
                         .instance = instance});
  if (!on_device) return made;
  return make_on_device(*devices_, bucket, std::move(made));
}

std::shared_ptr<std::byte> Planning::neutral_array(Call& call, bool output) {
  const size_t bytes = bytes_of(call);
  const auto memory = std::make_shared<Buffer>(bytes * (output ? 2 : 1));
  fill_neutral(call.dtype, call.reduction, memory->data(), bytes / item_bytes(call.dtype));
  if (!call.memory.is_on_device()) return {memory, memory->data()};
  if (!devices_) throw UsageError("this rank reduces arrays in the CPU's memory only");
  call.memory.device = last_device_;
  struct Copied {
    std::shared_ptr<Buffer> from;
    std::shared_ptr<std::byte> into;
  };
  const auto copied = std::make_shared<Copied>(
      Copied{memory, devices_->device_stage(last_device_, memory->size())});
  Executor& executor = devices_->of(last_device_);
  await(executor, executor.copy(copied->into.get(), memory->data(), bytes, false));
  return {copied, copied->into.get()};
}

void Planning::zero(const BucketSpec& bucket) const {
  const auto& on_device = bucket.on_device;
  size_t bytes = bucket.bytes;  // in the CPU's memory
  if (on_device) {
    devices_->of(on_device->device).zero(on_device->gradients.get(), on_device->gradient_bytes);
    if (on_device->is_there()) bytes -= on_device->gradient_bytes;
  }
  std::memset(on_device ? on_device->here.get() : bucket.data, 0, bytes);
}

}  // namespace ringdl

#include "engine/make_on_device.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "collective/device/device_allreduce.h"
#include "collective/device/library_allreduce.h"
#include "collective/device/staged.h"
#include "collective/row_partition.h"
#include "engine/bucket_table.h"
#include "reduce/adasum.h"

namespace ringdl {
namespace {

// Of slabs: one is copied in, one is between the ranks, one is copied out, and one waits.
constexpr size_t kPlaces = 4;

// What a rank hands in lies in `data`, and unless all is gathered, so does what it gets; only a
// reducescatter has an output of its own.
struct Traffic {
  bool comes_in = false;
  bool goes_out = false;
};

Traffic traffic_of(const Call& call, int rank) {
  switch (call.kind) {
    case Kind::kAllreduce:
      return {true, true};
    case Kind::kBroadcast:
      return {rank == call.root, rank != call.root};
    case Kind::kMessage:
      return {rank == 0, rank != 0};
    case Kind::kScatter:
      return {rank == call.root, false};
    case Kind::kBarrier:
      return {};
    default:
      return {true, false};
  }
}

// Whether a part of the result follows from the same part of the arrays.
bool goes_in_slabs(const Call& call) {
  const bool is_elementwise =
      call.kind == Kind::kBroadcast || call.kind == Kind::kMessage || call.kind == Kind::kAllreduce;
  return is_elementwise && !call.from_any && call.operation.digest != kAdasumDigest;
}

size_t aligned(size_t bytes) {
  return (bytes + Window::kAlignment - 1) / Window::kAlignment * Window::kAlignment;
}

std::unique_ptr<Collective> make_staged(DeviceExecutors& devices, size_t slab_bytes,
                                        Staged::MayBegin may_begin, const Surroundings& its,
                                        const Call& call, const Description& description,
                                        void* data, const Group& group) {
  const Traffic traffic = traffic_of(call, group.rank);
  auto* const array = static_cast<std::byte*>(data);
  const size_t bytes = bytes_of(call);
  const bool in_slabs = goes_in_slabs(call) && bytes > slab_bytes;
  if (!in_slabs) slab_bytes = bytes;
  size_t output_bytes = 0;
  if (call.kind == Kind::kReduceScatter) {
    const auto parts = row_partition(rows_of(call), row_bytes(call), group.size());
    output_bytes = parts[static_cast<size_t>(group.rank)].bytes;
  }
  const size_t output_begin = aligned(slab_bytes);
  // In memory that the ranks of the host share, if they do: then they reduce it there.
  const std::shared_ptr<std::byte> stage = devices.stage(
      call.memory.device, in_slabs ? kPlaces * slab_bytes : output_begin + output_bytes,
      [&its](size_t size) -> std::shared_ptr<std::byte> {
        if (its.window) return its.window->allocate_stage(size);
        auto buffer = std::make_shared<Buffer>(size);
        std::byte* const begin = buffer->data();
        return {std::move(buffer), begin};
      });
  std::vector<Staged::Slab> slabs;
  size_t begin = 0;
  do {
    std::byte* const place = stage.get() + slabs.size() % kPlaces * slab_bytes;
    const size_t size = std::min(slab_bytes, bytes - begin);
    slabs.push_back({{place, array + begin, traffic.comes_in ? size : 0},
                     {array + begin, place, traffic.goes_out ? size : 0}});
    begin += size;
  } while (begin < bytes);
  Call on_host = call;
  on_host.memory = {};
  if (call.kind == Kind::kReduceScatter) {
    on_host.output = stage.get() + output_begin;
    slabs[0].out = {static_cast<std::byte*>(call.output), stage.get() + output_begin, output_bytes};
  }
  auto make = [&executor = its.executor, segment_bytes = its.segment_bytes, window = its.window,
               layout = its.layout, on_host, description, group, in_slabs,
               slabs](size_t slab) mutable {
    const Staged::Copy& copy = slabs[slab].in;
    if (in_slabs) {
      const size_t size = std::max(copy.bytes, slabs[slab].out.bytes);
      on_host.shape = {static_cast<int64_t>(size / item_bytes(on_host.dtype))};
    }
    return make_collective({executor, segment_bytes, window, layout, nullptr}, on_host, description,
                           copy.into, group);
  };
  const Staged::Copiers copiers{devices.of(call.memory.device),
                                devices.second_of(call.memory.device)};
  return std::make_unique<Staged>(std::move(may_begin), copiers, std::move(slabs), kPlaces, stage,
                                  std::move(make), group.rank, group.size());
}

// Kernels reduce element by element, and so many arrays.
bool is_reduced_there(DeviceExecutors& devices, const Call& call, const Description& description,
                      const Surroundings& its, const Group& group) {
  return call.kind == Kind::kAllreduce && description.algorithm == Algorithm::kDirect &&
         its.window && its.layout->host_count() == 1 && call.operation.digest != kAdasumDigest &&
         group.ranks.size() <= devices.of(call.memory.device).most_arrays();
}

std::unique_ptr<Collective> make(DeviceExecutors& devices, size_t slab_bytes,
                                 Staged::MayBegin may_begin, const Surroundings& its,
                                 const Call& call, const Description& description, void* data,
                                 const Group& group) {
  if (!is_reduced_there(devices, call, description, its, group)) {
    return make_staged(devices, slab_bytes, std::move(may_begin), its, call, description, data,
                       group);
  }
  const int device = call.memory.device;
  refuse_wrong(call);
  auto fallback = [&devices, slab_bytes, may_begin, &executor = its.executor,
                   segment_bytes = its.segment_bytes, window = its.window, layout = its.layout,
                   call, description, data, group] {
    return make_staged(devices, slab_bytes, may_begin,
                       {executor, segment_bytes, window, layout, nullptr}, call, description, data,
                       group);
  };
  const CustomKernel custom = call.operation.kernel;
  const ReduceMany reduce_many = custom != nullptr
                                     ? ReduceMany(call.dtype, custom)
                                     : over_host(call.dtype, call.reduction, *its.layout);
  const AllreduceArguments arguments{.executor = devices.of(device),
                                     .data = static_cast<std::byte*>(data),
                                     .bytes = bytes_of(call),
                                     .reducer = Reducer(call.dtype, call.reduction, group.size()),
                                     .reduce_many = reduce_many,
                                     .codec = {},
                                     .segment_bytes = its.segment_bytes,
                                     .rank = group.rank,
                                     .size = group.size(),
                                     .ranks = group.ranks,
                                     .window = its.window,
                                     .layout = its.layout};
  const bool can_reduce = custom == nullptr || devices.has_custom(device, custom);
  return std::make_unique<DeviceAllreduce>(arguments, devices, device, can_reduce,
                                           std::move(may_begin), std::move(fallback));
}

// Asked until the caller's stream is past what is there now.
Staged::MayBegin mark(DeviceExecutors& devices, const Call& call) {
  const std::shared_ptr<Mark> mark = devices.mark(call.memory.device, call.stream);
  return [mark] { return mark->is_passed(); };
}

}  // namespace

std::unique_ptr<Collective> make_on_device(DeviceExecutors& devices, size_t slab_bytes,
                                           const Surroundings& its, const Call& call,
                                           const Description& description, void* data,
                                           const Group& group) {
  if (description.algorithm == Algorithm::kMpi) {  // a barrier
    return make_collective(its, call, description, data, group);
  }
  return make(devices, slab_bytes, mark(devices, call), its, call, description, data, group);
}

std::unique_ptr<Collective> make_by_library(DeviceExecutors& devices, size_t slab_bytes,
                                            const Surroundings& its, const Call& call,
                                            const Description& otherwise, void* data,
                                            const Group& group) {
  if (call.operation.kernel != nullptr || !devices.library_reduces(call.dtype, call.reduction)) {
    const std::string what = call.operation.kernel != nullptr
                                 ? call.operation.name
                                 : std::string(name_of(call.reduction));
    throw UsageError("NCCL has no allreduce of " + std::string(name_of(call.dtype)) + " by " +
                     what + "; take another algorithm");
  }
  refuse_wrong(call);
  const int device = call.memory.device;
  auto* const array = static_cast<std::byte*>(data);
  const Staged::MayBegin may_begin = mark(devices, call);
  auto fallback = [&devices, slab_bytes, may_begin, &executor = its.executor,
                   segment_bytes = its.segment_bytes, window = its.window, layout = its.layout,
                   call, otherwise, data, group] {
    return make(devices, slab_bytes, may_begin, {executor, segment_bytes, window, layout, nullptr},
                call, otherwise, data, group);
  };
  return std::make_unique<LibraryAllreduce>(
      devices.library(group.id, group.rank, group.size(), device), device,
      DeviceLibrary::Array{array, bytes_of(call) / item_bytes(call.dtype), call.dtype,
                           call.reduction},
      group.rank, group.size(), may_begin, call.algorithm.has_value(), std::move(fallback));
}

std::unique_ptr<Collective> make_by_library(DeviceExecutors& devices, const BucketSpec& bucket) {
  const Group& group = *bucket.group;
  const int device = bucket.on_device->device;
  return std::make_unique<LibraryAllreduce>(
      devices.library(group.id, group.rank, group.size(), device), device,
      DeviceLibrary::Array{static_cast<std::byte*>(bucket.data),
                           bucket.bytes / item_bytes(bucket.dtype), bucket.dtype, bucket.reduction},
      group.rank, group.size(), [] { return true; }, true, nullptr);
}

std::unique_ptr<Collective> make_on_device(DeviceExecutors& devices, const BucketSpec& bucket,
                                           std::unique_ptr<Collective> reduction) {
  const auto its = std::make_shared<BucketOnDevice>(*bucket.on_device);
  std::byte* there = its->gradients.get();
  size_t bytes = its->gradient_bytes;
  if (its->is_there()) {  // the flags follow
    there += bytes;
    bytes = bucket.bytes - bytes;
  }
  std::byte* const here = its->here.get();
  std::vector<Staged::Slab> whole{{{here, there, bytes}, {there, here, bytes}}};
  if (its->is_there()) std::swap(whole[0].in, whole[0].out);
  const Group& group = *bucket.group;
  const Staged::Copiers copiers{devices.of(its->device), devices.second_of(its->device)};
  auto may_begin = [&in = copiers.in, its] { return its->arrival->is_over(in); };
  auto made = std::make_shared<std::unique_ptr<Collective>>(std::move(reduction));
  return std::make_unique<Staged>(
      std::move(may_begin), copiers, std::move(whole), 1, its,
      [made](size_t) { return std::move(*made); }, group.rank, group.size());
}

}  // namespace ringdl

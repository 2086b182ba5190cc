#pragma once

#include <memory>

#include "engine/make_collective.h"

namespace ringdl {

struct BucketSpec;

/// The state machine for a call whose arrays lie on a device. An allreduce that is to be direct is
/// made there by ranks of one host that reach one another's devices. All else is that of the same
/// call in the host's memory, between copies, in slabs where that goes element by element.
/// @param devices  outlive it
/// @param slab_bytes  a multiple of 64
/// @param its  of the host
/// @throws as make_collective(); UsageError  there is no such device
std::unique_ptr<Collective> make_on_device(DeviceExecutors& devices, size_t slab_bytes,
                                           const Surroundings& its, const Call& call,
                                           const Description& description, void* data,
                                           const Group& group);

/// The same for an allreduce by another library (NCCL).
/// @param otherwise  how it goes on where some rank cannot use it, unless the call asks for it
/// @throws UsageError  the library has no such allreduce
std::unique_ptr<Collective> make_by_library(DeviceExecutors& devices, size_t slab_bytes,
                                            const Surroundings& its, const Call& call,
                                            const Description& otherwise, void* data,
                                            const Group& group);
/// The same for a bucket of gradients on a device, which all ranks can use it for.
std::unique_ptr<Collective> make_by_library(DeviceExecutors& devices, const BucketSpec& bucket);

/// For a bucket of gradients on a device: what precedes and follows their reduction.
/// @param reduction  of the gradients where they are reduced
std::unique_ptr<Collective> make_on_device(DeviceExecutors& devices, const BucketSpec& bucket,
                                           std::unique_ptr<Collective> reduction);

}  // namespace ringdl

#pragma once

#include <span>

#include "cuda/device.h"
#include "reduce/executor.h"

namespace ringdl::cuda {

/// See DeviceExecutors::pack(): one launch for each kMostPacked arrays, which are described in its
/// arguments.
void pack(Device& device, Stream stream, const Packing& how, std::span<const PackItem> items);

}  // namespace ringdl::cuda

#pragma once

#include <string>
#include <vector>

#include "cuda/driver.h"

namespace ringdl::cuda {

/// What is to be known of a device without making a context there.
struct DeviceFacts {
  std::string name;
  std::string bus;  // PCI, as nvidia-smi shows it
  size_t bytes = 0;
  int capability = 0;      // 10 * major + minor
  std::vector<int> peers;  // devices whose memory it can map
};

/// The devices that this process may use, in the order of their numbers (CUDA_VISIBLE_DEVICES
/// renumbers them).
/// @throws Error  the driver fails
std::vector<DeviceFacts> survey(const Functions& functions);

}  // namespace ringdl::cuda

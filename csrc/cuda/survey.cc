#include "cuda/survey.h"

#include <array>

namespace ringdl::cuda {

std::vector<DeviceFacts> survey(const Functions& its) {
  int count = 0;
  RINGDL_CUDA(its, DeviceGetCount, &count);
  std::vector<DeviceNumber> handles(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) RINGDL_CUDA(its, DeviceGet, &handles[static_cast<size_t>(i)], i);
  std::vector<DeviceFacts> devices;
  for (const DeviceNumber handle : handles) {
    DeviceFacts device;
    std::array<char, 256> text{};
    RINGDL_CUDA(its, DeviceGetName, text.data(), static_cast<int>(text.size()), handle);
    device.name = text.data();
    RINGDL_CUDA(its, DeviceGetPCIBusId, text.data(), static_cast<int>(text.size()), handle);
    device.bus = text.data();
    RINGDL_CUDA(its, DeviceTotalMem, &device.bytes, handle);
    int major = 0;
    int minor = 0;
    RINGDL_CUDA(its, DeviceGetAttribute, &major, DeviceAttribute::kCapabilityMajor, handle);
    RINGDL_CUDA(its, DeviceGetAttribute, &minor, DeviceAttribute::kCapabilityMinor, handle);
    device.capability = 10 * major + minor;
    for (int peer = 0; peer < count; ++peer) {
      int can = 0;
      const DeviceNumber other = handles[static_cast<size_t>(peer)];
      if (other == handle) continue;
      RINGDL_CUDA(its, DeviceCanAccessPeer, &can, handle, other);
      if (can != 0) device.peers.push_back(peer);
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace ringdl::cuda

#pragma once

#include <cstdint>
#include <string_view>

namespace ringdl {

/// What kind of memory an array lies in. Pinned memory is the CPU's. The values travel in headers,
/// so they never change.
enum class MemoryKind : uint8_t { kCpu = 0, kDevice = 1 };

constexpr std::string_view name_of(MemoryKind kind) {
  return kind == MemoryKind::kCpu ? "the CPU's" : "a device's";
}

/// Where an array lies.
struct Memory {
  MemoryKind kind = MemoryKind::kCpu;
  int device = 0;  // the number of a device, for this process

  bool is_on_device() const { return kind == MemoryKind::kDevice; }
};

}  // namespace ringdl

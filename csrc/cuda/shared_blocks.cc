#include "cuda/shared_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <utility>

#include "base/error.h"

namespace ringdl::cuda {
namespace {

// The driver maps whole pieces of this size into other processes.
constexpr size_t kPiece = 2 << 20;
// Before what is handed out: the proof that a block was reached. Drivers align as much.
constexpr size_t kHead = 256;

uint64_t random_number() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

// The driver opens no handle in the process that has made it.
uint64_t this_process() {
  static const uint64_t number = random_number();
  return number;
}

// What DevicePlace's words are.
struct Words {
  uint64_t process;
  Address block;   // in that process
  int64_t device;  // its number there
  uint64_t proof;
  MemoryHandle handle;
  uint64_t offset;  // in the block
};
static_assert(sizeof(Words) == sizeof(DevicePlace::words));

DevicePlace place_from(const Words& words) {
  DevicePlace place;
  std::memcpy(place.words.data(), &words, sizeof(words));
  return place;
}

Words words_of(const DevicePlace& place) {
  Words words;
  std::memcpy(&words, place.words.data(), sizeof(words));
  return words;
}

// An eighth of a block is unused at most, so that few sizes serve many.
size_t block_bytes(size_t bytes) {
  const size_t step = std::max(kPiece, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

// Whatever is there, the driver copies it or says that it is nothing of a device.
bool begins_with(const Device& device, std::byte* block, uint64_t proof) {
  uint64_t found = ~proof;
  try {
    device.copy(&found, block, sizeof(found));
  } catch (const Error&) {
    return false;
  }
  return found == proof;
}

// A block of another process.
std::shared_ptr<std::byte> opened(const Device& device, const MemoryHandle& handle) {
  const Device::Current current(device);
  Address address = 0;
  const Result result =
      device.functions().IpcOpenMemHandle(&address, handle, kIpcLazyEnablePeerAccess);
  if (result != kSuccess) return nullptr;
  return {reinterpret_cast<std::byte*>(address), [&device](std::byte* block) {
            try {
              const Device::Current now(device);
              device.functions().IpcCloseMemHandle(address_of(block));
            } catch (const Error&) {  // the device is lost, and the block with it
            }
          }};
}

}  // namespace

std::shared_ptr<std::byte> SharedBlocks::take(Device& device, size_t bytes, Use use) {
  const size_t wanted = block_bytes(bytes + kHead);
  std::byte* begin = nullptr;
  bool may_be_used = false;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [its_begin, block] : blocks_) {
      if (!block.is_free || block.bytes != wanted || block.device != &device) continue;
      if (begin != nullptr && block.may_be_used) continue;  // rather one that need not be awaited
      begin = its_begin;
      may_be_used = block.may_be_used;
      if (!may_be_used) break;
    }
    if (begin != nullptr) {
      blocks_.at(begin).is_free = false;
      blocks_.at(begin).may_be_used = use == Use::kCaller;
    }
  }
  if (begin == nullptr) {
    Block block = make_block_somehow(device, wanted);
    block.may_be_used = use == Use::kCaller;
    begin = block.memory.get();
    const std::lock_guard lock(mutex_);
    blocks_.emplace(begin, std::move(block));
  }
  std::shared_ptr<std::byte> memory(
      begin + kHead, [its = shared_from_this(), begin](std::byte*) { its->give_back(begin); });
  if (may_be_used) device.synchronize();
  return memory;
}

void SharedBlocks::give_back(std::byte* begin) {
  const std::lock_guard lock(mutex_);
  blocks_.at(begin).is_free = true;
}

SharedBlocks::Block SharedBlocks::make_block_somehow(Device& device, size_t bytes) {
  try {
    return make_block(device, bytes);
  } catch (const OutOfMemory&) {
  }
  std::vector<std::shared_ptr<std::byte>> freed;  // outside of the lock: the driver waits
  {
    const std::lock_guard lock(mutex_);
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      Block& block = at->second;
      const bool is_needless = block.is_free && !block.is_told && block.device == &device;
      if (is_needless) freed.push_back(std::move(block.memory));
      at = is_needless ? blocks_.erase(at) : std::next(at);
    }
  }
  freed.clear();
  return make_block(device, bytes);
}

// Some virtual devices have no handles: then other processes do not reach it.
SharedBlocks::Block SharedBlocks::make_block(Device& device, size_t bytes) {
  std::shared_ptr<std::byte> memory = device.allocate(bytes);
  Words words{this_process(), address_of(memory.get()), device.number(), random_number(), {}, 0};
  {
    const Device::Current current(device);
    static_cast<void>(device.functions().IpcGetMemHandle(&words.handle, words.block));
  }
  device.copy(memory.get(), &words.proof, sizeof(words.proof));
  return {&device, std::move(memory), bytes, place_from(words), false, false, false};
}

DevicePlace SharedBlocks::place_of(const std::byte* data, size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(const_cast<std::byte*>(data));
  if (after == blocks_.begin()) return {};
  auto& [begin, block] = *std::prev(after);
  const auto offset = static_cast<size_t>(data - begin);
  if (offset + bytes > block.bytes) return {};
  block.is_told = true;
  Words words = words_of(block.place);
  words.offset = offset;
  return place_from(words);
}

std::byte* ReachedBlocks::reach(Device& device, const DevicePlace& place) {
  Words words = words_of(place);
  const uint64_t offset = std::exchange(words.offset, 0);
  const auto [found, is_new] = blocks_.try_emplace({device.number(), place_from(words)});
  std::shared_ptr<std::byte>& block = found->second;
  if (is_new) {
    if (words.process != this_process()) {
      block = opened(device, words.handle);
    } else if (device.reaches(static_cast<int>(words.device))) {
      block = {std::shared_ptr<void>(), reinterpret_cast<std::byte*>(words.block)};
    }
    if (block && !begins_with(device, block.get(), words.proof)) block = nullptr;
  }
  return block ? block.get() + offset : nullptr;
}

}  // namespace ringdl::cuda

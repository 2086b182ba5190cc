#include "cuda/pinned.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"

namespace ringdl::cuda {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLeastBytes = 64 << 10;
constexpr size_t kMostBytes = 64 << 20;
constexpr size_t kMostFreeBytes = 256 << 20;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

// Two pins must not share a page.
std::shared_ptr<std::byte> pin(const Device& device, size_t bytes, const Allocate& allocate) {
  bytes = whole_pages(std::max<size_t>(bytes, 1));
  std::shared_ptr<std::byte> memory = allocate(bytes + kPage);
  const auto at = reinterpret_cast<uintptr_t>(memory.get());
  std::byte* const begin = memory.get() + (whole_pages(at) - at);
  const Device::Current current(device);
  const Result result = device.functions().MemHostRegister(begin, bytes, kHostRegisterPortable);
  if (result != kSuccess) return {memory, begin};
  return {begin, [&device, memory = std::move(memory)](std::byte* pinned) {
            try {
              const Device::Current now(device);
              device.functions().MemHostUnregister(pinned);
            } catch (const Error&) {  // the device is lost, and the pin with it
            }
          }};
}

std::shared_ptr<std::byte> StagePool::take(const Device& device, size_t bytes,
                                           const Allocate& allocate) {
  Piece piece{nullptr, bytes > kMostBytes ? bytes : std::max(std::bit_ceil(bytes), kLeastBytes)};
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(free_, piece.bytes, &Piece::bytes);
    if (found != free_.end()) {
      piece = std::move(*found);
      free_.erase(found);
      free_bytes_ -= piece.bytes;
    }
  }
  if (!piece.memory) piece.memory = pin(device, piece.bytes, allocate);
  std::byte* const begin = piece.memory.get();
  return {begin, [pool = weak_from_this(), piece = std::move(piece)](std::byte*) mutable {
            if (const auto its = pool.lock()) its->give_back(std::move(piece));
          }};
}

void StagePool::give_back(Piece piece) {
  const std::lock_guard lock(mutex_);
  if (piece.bytes > kMostBytes || free_bytes_ + piece.bytes > kMostFreeBytes) return;
  free_bytes_ += piece.bytes;
  free_.push_back(std::move(piece));
}

}  // namespace ringdl::cuda

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/shm/heap.h"
#include "transport/window.h"

namespace ringdl {

/// A window onto ordinary memory, for ranks that are objects of one thread.
/// Arrays that have a size and no content (PhantomMemory) may lie in it, too: each rank has one.
class HeapWindow final : public Window {
 public:
  /// All zeros at first. Only pages that are written to take memory, so it may be larger than that.
  struct Memory {
    explicit Memory(size_t its_bytes) : bytes(its_bytes), heap(kAlignment, its_bytes) {
      void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) throw OutOfMemory("no addresses are left for a rank's memory");
      madvise(at, bytes, MADV_NOHUGEPAGE);
      data = static_cast<std::byte*>(at);
    }
    ~Memory() { munmap(data, bytes); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::byte* data = nullptr;
    const size_t bytes;
    Heap heap;
  };
  using Memories = std::vector<std::shared_ptr<Memory>>;  // by rank; null: not reached

  /// @param memories  the same for the ranks of a host
  /// @param has_ended  whether a rank's process has; null: none ever does
  /// @param phantom  counts as what each rank has at the end of its memory
  HeapWindow(int rank, std::shared_ptr<const Memories> memories,
             std::function<bool(int)> has_ended = nullptr, std::span<const std::byte> phantom = {})
      : memories_(std::move(memories)),
        own_((*memories_)[static_cast<size_t>(rank)]),
        has_ended_(std::move(has_ended)),
        phantom_(phantom) {}
  HeapWindow(int rank, Memories memories)
      : HeapWindow(rank, std::make_shared<const Memories>(std::move(memories))) {}

  bool reaches(int rank) const override { return of(rank) != nullptr; }
  bool has_ended(int rank) const override { return has_ended_ && has_ended_(rank); }
  std::byte* at(int rank, uint64_t offset) const override {
    Memory& memory = *of(rank);
    if (offset < memory.bytes) return memory.data + offset;
    return const_cast<std::byte*>(phantom_.data()) + (offset - memory.bytes);
  }
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const override {
    const auto* const at = static_cast<const std::byte*>(data);
    const std::byte* const begin = own_->data;
    const std::byte* const phantom = phantom_.data();
    if (!phantom_.empty() && at >= phantom && at + bytes <= phantom + phantom_.size()) {
      return own_->bytes + static_cast<uint64_t>(at - phantom);
    }
    if (at < begin || at + bytes > begin + own_->bytes) return std::nullopt;
    return static_cast<uint64_t>(at - begin);
  }
  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    const auto begin = own_->heap.take(std::max<size_t>(bytes, 1), kAlignment);
    if (!begin) return nullptr;
    return {own_->data + *begin,
            [own = own_, at = *begin](std::byte*) { own->heap.give_back(at); }};
  }
  std::shared_ptr<std::byte> allocate_stage(size_t bytes) override {
    std::shared_ptr<std::byte> memory = allocate(bytes);
    if (!memory) throw OutOfMemory("the heap is full");
    return memory;
  }
  void free_once(std::shared_ptr<std::byte> memory, const std::atomic<uint64_t>& counter,
                 uint64_t value) override {
    kept_.push_back({std::move(memory), &counter, value});
    std::erase_if(kept_, [](const Kept& kept) { return kept.counter->load() >= kept.value; });
  }

 private:
  struct Kept {
    std::shared_ptr<std::byte> memory;
    const std::atomic<uint64_t>* counter;
    uint64_t value;
  };

  const std::shared_ptr<Memory>& of(int rank) const {
    return (*memories_)[static_cast<size_t>(rank)];
  }

  const std::shared_ptr<const Memories> memories_;
  const std::shared_ptr<Memory> own_;
  const std::function<bool(int)> has_ended_;
  const std::span<const std::byte> phantom_;
  std::vector<Kept> kept_;
};

}  // namespace ringdl

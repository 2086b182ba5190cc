#include "transport/host/window.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

// What is freed in pieces of this size or more goes back to the system. So do smaller ones, such as
// stages, while there are many of them.
constexpr uint64_t kDiscardBytes = 1 << 20;
constexpr uint64_t kKeptBytes = 8 << 20;

}  // namespace

Window::Window(int rank, int size, size_t bytes)
    : own_(std::make_shared<Own>(Segment::create(bytes), kAlignment)),
      segments_(static_cast<size_t>(size)) {
  segments_[static_cast<size_t>(rank)] = own_->segment;
}

// A segment is a file to the system: one longer than RLIMIT_FSIZE would end the process. And a
// process maps those of all ranks of its host into 2^47 bytes of addresses.
size_t Window::default_bytes(int local_ranks) {
  constexpr size_t addresses = size_t{1} << 45;
  constexpr size_t least = 64 << 20;
  size_t bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = std::min(bytes, addresses / static_cast<size_t>(local_ranks));
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    bytes = std::min<size_t>(bytes, limit.rlim_cur);
  }
  if (bytes < least) throw Error("shared memory is limited to " + std::to_string(bytes) + " bytes");
  return bytes;
}

bool Window::reach(int rank, const Segment::Address& address) {
  auto& segment = segments_[static_cast<size_t>(rank)];
  if (segment == nullptr) segment = Segment::open(address);
  return segment != nullptr;
}

std::optional<uint64_t> Window::offset_of(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(own_->segment->data());
  const auto at = reinterpret_cast<uintptr_t>(data);
  const size_t size = own_->segment->size();
  if (at < begin || at - begin > size || size - (at - begin) < bytes) return std::nullopt;
  return at - begin;
}

std::shared_ptr<std::byte> Window::allocate(size_t bytes) {
  std::optional<uint64_t> begin;
  {
    const std::lock_guard guard(own_->mutex);
    begin = own_->heap.take(bytes, kAlignment);
    if (begin && bytes < kDiscardBytes) own_->small_bytes += bytes;
  }
  if (!begin) throw std::bad_alloc();
  return {own_->segment->data() + *begin,
          [own = own_, begin = *begin, bytes, process = getpid()](std::byte*) {
            if (getpid() == process) own->give_back(begin, bytes);  // else it is the parent's
          }};
}

void Window::Own::give_back(uint64_t begin, size_t bytes) {
  bool is_kept = bytes < kDiscardBytes;
  if (is_kept) {
    const std::lock_guard guard(mutex);
    is_kept = small_bytes <= kKeptBytes;
    small_bytes -= bytes;
  }
  if (!is_kept) segment->discard(begin, begin + bytes);
  const std::lock_guard guard(mutex);
  heap.give_back(begin);
}

void Window::free_once(std::shared_ptr<std::byte> memory, const std::atomic<uint64_t>& counter,
                       uint64_t value) {
  const std::lock_guard guard(kept_mutex_);
  std::erase_if(kept_, [](const Kept& kept) {
    return kept.counter->load(std::memory_order_acquire) >= kept.value;
  });
  if (counter.load(std::memory_order_acquire) >= value) return;
  kept_.push_back({std::move(memory), &counter, value});
}

}  // namespace ringdl

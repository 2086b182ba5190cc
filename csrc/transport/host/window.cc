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

// What is freed in pieces of this size or more goes back to the system, but for a few that are kept
// for the next of the same size: stages are allocated and freed with each call, and touching 512
// KiB of new pages takes longer than reducing as much.
constexpr uint64_t kDiscardBytes = 64 << 10;
constexpr uint64_t kSpareBytes = 8 << 20;
constexpr uint64_t kLargestSpare = 4 << 20;

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
    begin = own_->take(bytes);
    if (!begin) {
      own_->drop_spare();
      begin = own_->take(bytes);
    }
  }
  if (!begin) throw std::bad_alloc();
  return {own_->segment->data() + *begin,
          [own = own_, begin = *begin, bytes, process = getpid()](std::byte*) {
            if (getpid() == process) own->give_back(begin, bytes);  // else it is the parent's
          }};
}

std::optional<uint64_t> Window::Own::take(size_t bytes) {
  const auto found = std::find_if(spare.begin(), spare.end(),
                                  [&](const Spare& piece) { return piece.bytes == bytes; });
  if (found == spare.end()) return heap.take(bytes, kAlignment);
  const uint64_t begin = found->begin;
  spare.erase(found);
  spare_bytes -= bytes;
  return begin;
}

void Window::Own::give_back(uint64_t begin, size_t bytes) {
  if (bytes >= kDiscardBytes) {
    {
      const std::lock_guard guard(mutex);
      if (bytes <= kLargestSpare && spare_bytes + bytes <= kSpareBytes) {
        spare.push_back({begin, bytes});
        spare_bytes += bytes;
        return;
      }
    }
    segment->discard(begin, begin + bytes);
  }
  const std::lock_guard guard(mutex);
  heap.give_back(begin);
}

void Window::Own::drop_spare() {
  for (const Spare& piece : spare) {
    segment->discard(piece.begin, piece.begin + piece.bytes);
    heap.give_back(piece.begin);
  }
  spare.clear();
  spare_bytes = 0;
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

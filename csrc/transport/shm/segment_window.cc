#include "transport/shm/segment_window.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

// Touching new pages takes longer than reducing as much. These are the bytes that stay: of stages,
// as many works may be in flight at once, and of arrays, which programs make anew in each step.
constexpr uint64_t kKeptStageBytes = 64 << 20;
constexpr uint64_t kKeptArrayBytes = 32 << 20;

// Smaller pieces keep their pages for the next use.
constexpr uint64_t kDiscardBytes = 64 << 10;

constexpr uint64_t kPage = 4096;

}  // namespace

SegmentWindow::SegmentWindow(int rank, int size, size_t bytes, bool reserves)
    : own_(std::make_shared<Own>(Segment::create(bytes), reserves)),
      segments_(static_cast<size_t>(size)) {
  segments_[static_cast<size_t>(rank)] = own_->segment;
}

// A segment is a file to the system: one longer than RLIMIT_FSIZE would end the process. A process
// maps those of all ranks of its host into 2^47 bytes of addresses.
size_t SegmentWindow::default_bytes(int local_ranks) {
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

bool SegmentWindow::commits_strictly() {
  std::ifstream setting("/proc/sys/vm/overcommit_memory");
  char mode = '0';
  return setting.get(mode) && mode == '2';
}

bool SegmentWindow::reach(int rank, const Segment::Address& address) {
  auto& segment = segments_[static_cast<size_t>(rank)];
  if (segment == nullptr) segment = Segment::open(address);
  return segment != nullptr;
}

std::optional<uint64_t> SegmentWindow::offset_of(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(own_->segment->data());
  const auto at = reinterpret_cast<uintptr_t>(data);
  const size_t size = own_->segment->size();
  if (at < begin || at - begin > size || size - (at - begin) < bytes) return std::nullopt;
  return at - begin;
}

std::shared_ptr<std::byte> SegmentWindow::allocate(size_t bytes) {
  if (getpid() != own_->process) return nullptr;
  free_kept();
  return hold(own_->take_array(bytes), bytes);
}

std::shared_ptr<std::byte> SegmentWindow::allocate_stage(size_t bytes) {
  std::shared_ptr<std::byte> memory = hold(own_->take_stage(bytes), bytes);
  if (!memory) memory = allocate(bytes);
  if (memory) return memory;
  throw OutOfMemory("this call needs " + std::to_string(bytes) + " bytes more of the " +
                    std::to_string(own_->segment->size()) +
                    " that this rank may share with the others of its host: wait for works in "
                    "flight before submitting more, or raise the limit of file sizes (ulimit -f) "
                    "if there is one");
}

std::shared_ptr<std::byte> SegmentWindow::hold(std::optional<uint64_t> begin, size_t bytes) const {
  if (!begin) return nullptr;
  const Piece piece{*begin, std::max<size_t>(bytes, 1)};
  if (own_->reserves && !own_->segment->reserve(piece.begin, piece.end())) {
    own_->give_back(piece);
    return nullptr;
  }
  return {own_->segment->data() + piece.begin, [own = own_, piece](std::byte*) {
            if (getpid() == own->process) own->give_back(piece);  // else it is the parent's
          }};
}

SegmentWindow::Own::Own(std::shared_ptr<Segment> its_segment, bool reserves_pages)
    : segment(std::move(its_segment)),
      process(getpid()),
      reserves(reserves_pages),
      kept_end(stages_begin(*segment) + kKeptStageBytes),
      arrays(kAlignment, stages_begin(*segment)),
      stages(stages_begin(*segment), segment->size()) {}

uint64_t SegmentWindow::Own::stages_begin(const Segment& segment) {
  return segment.size() / 4 * 3 / kPage * kPage;
}

std::optional<uint64_t> SegmentWindow::Own::take_stage(size_t bytes) {
  const std::lock_guard guard(mutex);
  return stages.take(bytes, kAlignment);
}

std::optional<uint64_t> SegmentWindow::Own::take_array(size_t bytes) {
  std::vector<Piece> dropped;
  {
    const std::lock_guard guard(mutex);
    const auto found = std::find_if(spare.rbegin(), spare.rend(),
                                    [bytes](const Piece& piece) { return piece.bytes == bytes; });
    if (found != spare.rend()) {
      const uint64_t begin = found->begin;
      spare.erase(std::next(found).base());
      spare_bytes -= bytes;
      return begin;
    }
    if (const auto begin = arrays.take(bytes, kAlignment)) return begin;
    dropped.assign(spare.begin(), spare.end());
    spare.clear();
    spare_bytes = 0;
  }
  discard(dropped);
  const std::lock_guard guard(mutex);
  return arrays.take(bytes, kAlignment);
}

void SegmentWindow::Own::give_back(Piece piece) {
  if (leaves_pages.load()) return;
  if (is_stage(piece)) {
    if (piece.bytes >= kDiscardBytes) {
      segment->discard(std::max(piece.begin, kept_end), piece.end());
    }
    const std::lock_guard guard(mutex);
    stages.give_back(piece.begin);
    return;
  }
  std::vector<Piece> dropped;
  {
    const std::lock_guard guard(mutex);
    if (piece.bytes < kDiscardBytes) {
      arrays.give_back(piece.begin);
      return;
    }
    spare.push_back(piece);
    spare_bytes += piece.bytes;
    while (spare_bytes > kKeptArrayBytes) {
      dropped.push_back(spare.front());
      spare_bytes -= spare.front().bytes;
      spare.pop_front();
    }
  }
  discard(dropped);
}

void SegmentWindow::Own::discard(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) segment->discard(piece.begin, piece.end());
  const std::lock_guard guard(mutex);
  for (const Piece& piece : pieces) arrays.give_back(piece.begin);
}

SegmentWindow::~SegmentWindow() {
  own_->leaves_pages = true;
  kept_.clear();
  own_->leaves_pages = false;
}

void SegmentWindow::free_kept() {
  const std::lock_guard guard(kept_mutex_);
  std::erase_if(kept_, [](const Kept& kept) {
    return kept.counter->load(std::memory_order_acquire) >= kept.value;
  });
}

void SegmentWindow::free_once(std::shared_ptr<std::byte> memory,
                              const std::atomic<uint64_t>& counter, uint64_t value) {
  free_kept();
  const std::lock_guard guard(kept_mutex_);
  if (counter.load(std::memory_order_acquire) >= value) return;
  kept_.push_back({std::move(memory), &counter, value});
}

}  // namespace ringdl

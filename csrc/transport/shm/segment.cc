#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#include "base/error.h"

namespace ringdl {
namespace {

// This process's own segments, by nonce: ranks may be threads of one process.
std::mutex own_mutex;
std::map<uint64_t, std::weak_ptr<Segment>>& own_segments() {
  static auto* const segments = new std::map<uint64_t, std::weak_ptr<Segment>>;
  return *segments;
}

std::string reason() { return std::strerror(errno); }

// Excluded from core dumps: a dump would be as large as the machine's memory, and making it would
// allocate that.
std::byte* map(int descriptor, size_t bytes) {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_DONTDUMP);
  return static_cast<std::byte*>(data);
}

// Systems may refuse files in memory that could be executed (vm.memfd_noexec); those before
// Linux 6.3 do not know the flag that says so.
int open_memory() {
  constexpr unsigned no_exec = 0x8;  // MFD_NOEXEC_SEAL
  const int descriptor = memfd_create("ringdl", MFD_CLOEXEC | no_exec);
  return descriptor < 0 && errno == EINVAL ? memfd_create("ringdl", MFD_CLOEXEC) : descriptor;
}

uint64_t nonce_of(const std::byte* data) {
  uint64_t nonce = 0;
  std::memcpy(&nonce, data, sizeof(nonce));
  return nonce;
}

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  const int descriptor = open_memory();
  if (descriptor < 0) throw Error("memfd_create failed: " + reason());
  uint64_t nonce = 0;
  std::byte* data = nullptr;
  if (fchmod(descriptor, S_IRUSR | S_IWUSR) == 0 &&
      ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 &&
      getrandom(&nonce, sizeof(nonce), 0) == sizeof(nonce) &&
      pwrite(descriptor, &nonce, sizeof(nonce), 0) == sizeof(nonce)) {
    data = map(descriptor, bytes);
  }
  if (data == nullptr) {
    const std::string why = reason();
    close(descriptor);
    throw Error("shared memory of " + std::to_string(bytes) + " bytes cannot be had: " + why);
  }
  std::shared_ptr<Segment> segment(new Segment(getpid(), descriptor, bytes, data));
  const std::lock_guard guard(own_mutex);
  own_segments()[nonce] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::open(const Address& address) {
  if (address.process == getpid()) {
    const std::lock_guard guard(own_mutex);
    const auto found = own_segments().find(address.nonce);
    return found == own_segments().end() ? nullptr : found->second.lock();
  }
  const std::string path =
      "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor < 0) return nullptr;
  struct stat status{};
  std::byte* data = nullptr;
  if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) &&
      static_cast<uint64_t>(status.st_size) == address.bytes) {
    data = map(descriptor, address.bytes);
  }
  close(descriptor);
  if (data == nullptr) return nullptr;
  std::shared_ptr<Segment> segment(new Segment(address.process, -1, address.bytes, data));
  return nonce_of(data) == address.nonce ? segment : nullptr;
}

Segment::~Segment() {
  if (descriptor_ >= 0 && process_ == getpid()) {  // a forked child might find it locked for good
    const std::lock_guard guard(own_mutex);
    own_segments().erase(nonce_of(data_));
  }
  munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

Segment::Address Segment::address() const {
  return {process_, descriptor_, bytes_, nonce_of(data_)};
}

// A process that nobody has waited for yet is still there for kill(). One whose main thread alone
// has ended looks like that, too, but for its other threads.
bool Segment::is_orphaned() const {
  if (kill(static_cast<pid_t>(process_), 0) != 0 && errno == ESRCH) return true;
  std::ifstream file("/proc/" + std::to_string(process_) + "/stat");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t name_end = text.rfind(')');  // then a space, and the state
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  if (text[name_end + 2] != 'Z' && text[name_end + 2] != 'X') return false;
  std::error_code ignored;
  std::filesystem::directory_iterator threads("/proc/" + std::to_string(process_) + "/task",
                                              ignored);
  return std::distance(std::filesystem::begin(threads), std::filesystem::end(threads)) <= 1;
}

// Not by fallocate, which does the same: MPI libraries keep what they have registered with a
// network adapter for the next message from there, until munmap, madvise or the like replaces the
// pages. They watch these calls, but not fallocate.
void Segment::discard(uint64_t begin, uint64_t end) const {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  end = end / page * page;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_REMOVE);
}

bool Segment::reserve(uint64_t begin, uint64_t end) const {
  return fallocate(descriptor_, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin)) == 0;
}

}  // namespace ringdl

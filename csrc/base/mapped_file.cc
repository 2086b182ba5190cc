#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace ringdl {

MappedFile::MappedFile(const std::string& path, size_t bytes)
    : bytes_(bytes), file_(open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (file_ < 0) throw Error(path + " cannot be written: " + std::strerror(errno));
  int problem = posix_fallocate(file_, 0, static_cast<off_t>(bytes));
  void* const mapped = problem != 0
                           ? MAP_FAILED
                           : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED) {
    if (problem == 0) problem = errno;
    close(file_);
    unlink(path.c_str());
    throw Error(path + " cannot be written: " + std::strerror(problem));
  }
  data_ = static_cast<std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  munmap(data_, bytes_);
  close(file_);
}

// Not msync(MS_ASYNC), which does nothing in Linux.
void MappedFile::flush() const { sync_file_range(file_, 0, 0, SYNC_FILE_RANGE_WRITE); }

}  // namespace ringdl

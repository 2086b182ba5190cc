#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "base/error.h"

namespace ringdl {

MappedFile::MappedFile(const std::string& path, size_t bytes) : bytes_(bytes) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) throw Error(path + " cannot be written: " + std::strerror(errno));
  const int problem = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  void* const mapped =
      problem != 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int reason = problem != 0 ? problem : errno;
  close(file);
  if (mapped == MAP_FAILED) throw Error(path + " cannot be written: " + std::strerror(reason));
  data_ = static_cast<std::byte*>(mapped);
}

MappedFile::~MappedFile() { munmap(data_, bytes_); }

void MappedFile::flush() const { msync(data_, bytes_, MS_ASYNC); }

}  // namespace ringdl

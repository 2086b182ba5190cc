#pragma once

#include <cstddef>
#include <string>

namespace ringdl {

/// A file in memory: what is written there is the file's, however the process ends.
class MappedFile {
 public:
  /// Makes a file of zeros, or empties it. Its space is allocated: a full disk is found here.
  /// @throws Error  the system refuses; there is no file then
  MappedFile(const std::string& path, size_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::byte* data() const { return data_; }
  /// Has the system begin to write what it has not yet written, for other hosts to see.
  void flush() const;

 private:
  const size_t bytes_;
  int file_ = -1;
  std::byte* data_ = nullptr;
};

}  // namespace ringdl

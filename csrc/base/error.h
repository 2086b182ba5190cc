#pragma once

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringdl {

/// The root of all errors that ringdl raises. Each says what happened, where (rank, key), and what
/// to do. In Python: one class of the same name per class here; Error is a RuntimeError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Ranks disagree on what a key means, or wait for a key that some rank never submits.
class MismatchError : public Error {
 public:
  using Error::Error;
};

/// A wait took longer than its timeout. The work stays in flight and may be waited for again.
class StallError : public Error {
 public:
  using Error::Error;
};

/// A rank's process has ended without shutdown(): no work that includes it can end any more. Groups
/// without it go on.
class RankFailedError : public Error {
 public:
  using Error::Error;
};

/// A call that is wrong whatever the other ranks do. In Python also a ValueError.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A device fails in the middle of a work. In Python: Error.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// There is not enough memory. In Python: MemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text)
      : text_(std::make_shared<const std::string>(std::move(text))) {}
  const char* what() const noexcept override { return text_->c_str(); }

 private:
  std::shared_ptr<const std::string> text_;
};

}  // namespace ringdl

#pragma once

#include <memory>

#include "engine/call.h"
#include "engine/failure.h"
#include "engine/work.h"

namespace ringdl {

/// What parts of an engine that submit works of their own need of it.
class Submitter {
 public:
  /// The next use of what a call is matched by.
  virtual Key next_key(const Call& call, const Group& group) = 0;
  /// What other ranks are told of a call.
  virtual Description header_of(const Call& call) = 0;
  /// Up to how many bytes messages of a work that is submitted now travel as control messages.
  virtual uint32_t inline_bytes() const = 0;
  /// Submits a call under a key.
  /// @param memory  what it reads and writes, if that is not the caller's
  virtual std::shared_ptr<Work> submit_as(const Key& key, const Call& call,
                                          const Description& description, void* data,
                                          std::shared_ptr<const void> memory) = 0;
  /// Tells a rank, perhaps this one, that a key fails on all.
  virtual void tell_failure(int to, MessageType type, const Key& key, const Failure& why) = 0;

 protected:
  ~Submitter() = default;
};

}  // namespace ringdl

#pragma once

#include <memory>

#include "engine/call.h"
#include "engine/failure.h"
#include "engine/work.h"

namespace ringdl {

/// What parts of an engine that submit works of their own need from it.
class Submitter {
 public:
  /// The next key that a call is matched by.
  virtual Key next_key(const Call& call, const Group& group) = 0;
  /// What is sent to other ranks about a call.
  virtual Description header_of(const Call& call) = 0;
  /// Messages of a work submitted now are sent as control messages up to this many bytes.
  virtual uint32_t inline_bytes() const = 0;
  /// Submits a call under a key.
  /// @param memory  what it reads and writes, if that is not the caller's
  virtual std::shared_ptr<Work> submit_as(const Key& key, const Call& call,
                                          const Description& description, void* data,
                                          std::shared_ptr<const void> memory) = 0;
  /// The same with a state machine, which may have been stepped already.
  virtual std::shared_ptr<Work> submit_begun(const Key& key, const Description& description,
                                             const SharedGroup& group,
                                             std::unique_ptr<Collective> collective,
                                             std::shared_ptr<const void> memory) = 0;
  /// Notifies a rank, perhaps this one, that a key fails on all.
  virtual void send_failure(int to, MessageType type, const Key& key, const Failure& why) = 0;

 protected:
  ~Submitter() = default;
};

}  // namespace ringdl

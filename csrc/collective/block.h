#pragma once

#include "collective/channel.h"

namespace ringdl {

/// A block that goes to one rank in segments, a bounded number of them at once. No messages at all
/// if it is empty.
class OutgoingBlock {
 public:
  /// @param before  messages of the same work that go to `to` before the block
  /// @param data    `bytes` bytes, only read; the caller's
  OutgoingBlock(int to, int64_t before, const std::byte* data, size_t bytes, size_t segment_bytes);

  /// Sends what may be sent now. True once the block, and what goes before it, has left.
  bool step(Channel& channel);

 private:
  int to_;
  int64_t before_;
  const std::byte* data_;
  size_t bytes_;
  size_t segment_bytes_;
  int64_t segments_;
  int64_t launched_ = 0;
};

/// The receiving end of such a block.
class IncomingBlock {
 public:
  /// @param before  messages of the same work that come from `from` before the block
  /// @param data    room for `bytes` bytes; the caller's
  IncomingBlock(int from, int64_t before, std::byte* data, size_t bytes, size_t segment_bytes);

  /// Posts the receives that may be posted now. True once the block has arrived.
  bool step(Channel& channel);

 private:
  int from_;
  int64_t before_;
  std::byte* data_;
  size_t bytes_;
  size_t segment_bytes_;
  int64_t segments_;
  int64_t posted_ = 0;
};

}  // namespace ringdl

#include "collective/block.h"

#include <algorithm>

namespace ringdl {
namespace {

constexpr int64_t kDepth = 4;

int64_t segment_count(size_t bytes, size_t segment_bytes) {
  return static_cast<int64_t>((bytes + segment_bytes - 1) / segment_bytes);
}

}  // namespace

OutgoingBlock::OutgoingBlock(int to, int64_t before, const std::byte* data, size_t bytes,
                             size_t segment_bytes)
    : to_(to),
      before_(before),
      data_(data),
      bytes_(bytes),
      segment_bytes_(segment_bytes),
      segments_(segment_count(bytes, segment_bytes)) {}

bool OutgoingBlock::step(Channel& channel) {
  while (launched_ < segments_ && launched_ + before_ < channel.sent(to_) + 2 * kDepth) {
    const size_t begin = static_cast<size_t>(launched_++) * segment_bytes_;
    channel.send(to_, data_ + begin, std::min(segment_bytes_, bytes_ - begin));
  }
  return channel.sent(to_) == before_ + segments_;
}

IncomingBlock::IncomingBlock(int from, int64_t before, std::byte* data, size_t bytes,
                             size_t segment_bytes)
    : from_(from),
      before_(before),
      data_(data),
      bytes_(bytes),
      segment_bytes_(segment_bytes),
      segments_(segment_count(bytes, segment_bytes)) {}

bool IncomingBlock::step(Channel& channel) {
  while (posted_ < segments_ && posted_ + before_ < channel.received(from_) + kDepth) {
    const size_t begin = static_cast<size_t>(posted_++) * segment_bytes_;
    channel.receive(from_, data_ + begin, std::min(segment_bytes_, bytes_ - begin));
  }
  return channel.received(from_) == before_ + segments_;
}

}  // namespace ringdl

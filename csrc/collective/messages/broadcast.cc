#include "collective/messages/broadcast.h"

#include <algorithm>

namespace ringdl {

Broadcast::Broadcast(std::byte* data, size_t bytes, int root, int rank, int size,
                     size_t segment_bytes)
    : data_(data),
      partition_(bytes, 1, segment_bytes),
      receives_(rank != root),
      sends_((rank + 1) % size != root) {}

// The chain never uses the edge from root-1 to root, and the barrier's rounds never use the edges
// between neighbours, so the two never share a stream of messages.
bool Broadcast::step(Channel& channel) {
  const int previous = (channel.rank() + channel.size() - 1) % channel.size();
  const int next = (channel.rank() + 1) % channel.size();
  const int64_t segments = partition_.segments();
  received_ = receives_ ? channel.received(previous) : segments;
  while (receives_ && posted_ < std::min(segments, received_ + kDepth)) {
    const Span span = partition_.segment(0, static_cast<int>(posted_++));
    channel.receive(previous, data_ + span.begin, span.bytes);
    received_ = channel.received(previous);
  }
  while (sends_ && launched_ < std::min(received_, channel.sent(next) + 2 * kDepth)) {
    const Span span = partition_.segment(0, static_cast<int>(launched_++));
    channel.send(next, data_ + span.begin, span.bytes);
  }
  if (!barrier_done_) barrier_done_ = barrier_.step(channel);
  return barrier_done_ && received_ == segments && (!sends_ || channel.sent(next) == segments);
}

std::string Broadcast::describe() const {
  return "broadcast: " + std::to_string(received_) + " of " +
         std::to_string(partition_.segments()) + " segments received, " + barrier_.describe();
}

}  // namespace ringdl

#include "server/remote_visit.h"

#include <cstring>
#include <utility>

namespace ringdl {
namespace {

constexpr int kServer = 1;

size_t bytes_of(const Shard::Shape& shape) { return shape.count * item_bytes(shape.dtype); }

}  // namespace

RemoteVisit::RemoteVisit(const Request& request, std::vector<Piece> pieces,
                         const Shard::Shape& shape, size_t segment_bytes)
    : request_(request),
      pieces_(std::move(pieces)),
      shape_(shape),
      there_(1, request.brings() ? bytes_of(shape) : 0, segment_bytes),
      back_(0, request.gets() ? bytes_of(shape) : 0, segment_bytes) {}

std::byte* RemoteVisit::slot(Buffer& slots, const Passage& passage, int64_t number) {
  const size_t bytes = passage.segment(0).bytes;  // the others are no larger
  if (slots.size() == 0) {
    slots = Buffer(bytes * static_cast<size_t>(std::min(Passage::kDepth, passage.segments())));
  }
  return slots.data() + static_cast<size_t>(number % Passage::kDepth) * bytes;
}

template <class Act>
void RemoteVisit::for_each_part_of(const Span& segment, const Act& act) const {
  const size_t item = item_bytes(shape_.dtype);
  const size_t from = shape_.begin + segment.begin / item;
  for_each_part(pieces_, from, from + segment.bytes / item, item,
                [&](size_t begin, std::byte* data, size_t count) {
                  act(data, (begin - from) * item, count * item);
                });
}

bool RemoteVisit::step(Channel& channel) {
  if (!std::exchange(has_asked_, true)) channel.send(kServer, &request_, sizeof(request_));
  there_.start([&] { return channel.sent(kServer); },
               [&](int64_t number) {
                 const Span segment = there_.segment(number);
                 std::byte* const to = slot(sending_, there_, number);
                 for_each_part_of(segment, [&](std::byte* data, size_t at, size_t bytes) {
                   std::memcpy(to + at, data, bytes);
                 });
                 channel.send(kServer, to, segment.bytes);
               });
  const auto take = [&] {
    for (; taken_ < channel.received(kServer); ++taken_) {
      const std::byte* const from = slot(receiving_, back_, taken_);
      for_each_part_of(back_.segment(taken_), [&](std::byte* data, size_t at, size_t bytes) {
        std::memcpy(data, from + at, bytes);
      });
    }
    return taken_;
  };
  back_.start(take, [&](int64_t number) {
    channel.receive(kServer, slot(receiving_, back_, number), back_.segment(number).bytes);
  });
  return there_.is_over(channel.sent(kServer)) && back_.is_over(take());
}

std::string RemoteVisit::describe() const {
  return "parameter server: " + std::to_string(taken_) + " of " + std::to_string(back_.segments()) +
         " segments received";
}

}  // namespace ringdl

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "collective/collective.h"
#include "collective/partition.h"
#include "server/pieces.h"
#include "server/request.h"
#include "server/shard.h"

namespace ringdl {

/// An array that travels to or from one rank, a message for each part, several at once; an empty
/// one is a message, too.
class Passage {
 public:
  /// How many are on their way: what may arrive while a rank does not look.
  static constexpr int64_t kDepth = 8;

  /// @param before  messages of the same direction that precede it
  Passage(int64_t before, size_t bytes, size_t segment_bytes)
      : before_(before), partition_(bytes, 1, segment_bytes) {}

  int64_t segments() const { return partition_.segments(); }
  Span segment(int64_t number) const { return partition_.segment(0, static_cast<int>(number)); }
  /// Starts what may be.
  /// @param ended  returns how many messages have, with those before
  /// @param act  sends a segment, or posts its receive
  template <class Ended, class Act>
  void start(const Ended& ended, const Act& act) {
    while (started_ < std::min(segments(), ended() - before_ + kDepth)) act(started_++);
  }
  bool is_over(int64_t ended) const { return ended - before_ == segments(); }

 private:
  const int64_t before_;
  const Partition partition_;
  int64_t started_ = 0;
};

/// A call to a shard on another host, as its caller makes it: the first of a channel's two ranks.
class RemoteVisit final : public Collective {
 public:
  /// @param pieces  what is pushed, or where parameters go; they live as long
  /// @param shape  the shard's
  RemoteVisit(const Request& request, std::vector<Piece> pieces, const Shard::Shape& shape,
              size_t segment_bytes);

  bool greets_next() const override { return true; }
  bool step(Channel& channel) override;
  std::string describe() const override;

 private:
  /// Where a segment is while it is on its way.
  static std::byte* slot(Buffer& slots, const Passage& passage, int64_t number);
  /// Calls `act(data, at, bytes)` for what pieces have of a segment, `at` of which it begins.
  template <class Act>
  void for_each_part_of(const Span& segment, const Act& act) const;

  const Request request_;
  const std::vector<Piece> pieces_;
  const Shard::Shape shape_;
  bool has_asked_ = false;
  Passage there_;
  Passage back_;
  int64_t taken_ = 0;  // segments
  Buffer sending_;
  Buffer receiving_;
};

}  // namespace ringdl

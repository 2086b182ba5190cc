#include "server/visit.h"

#include <algorithm>
#include <utility>

namespace ringdl {

Visit::Visit(std::span<const Shard> shards, std::vector<Piece> pieces, int rank,
             const Window* window, Action action)
    : shards_(shards),
      pieces_(std::move(pieces)),
      rank_(rank),
      window_(window),
      action_(std::move(action)) {
  skip_empty();
}

Visit::~Visit() {
  if (held_) held_->give_back();
}

void Visit::skip_empty() {
  while (!is_done() && block_ == shard().blocks()) {
    if (held_) std::exchange(held_, nullptr)->give_back();
    block_ = 0;
    ++visited_;
  }
}

bool Visit::step(bool looks_for_dead) {
  const Window* const window = looks_for_dead ? window_ : nullptr;
  if (is_done()) return false;
  awaited_ = shard().lock(block_).holder();
  if (!shard().lock(block_).try_take(rank_, window)) return false;
  if (held_) held_->give_back();
  held_ = &shard().lock(block_);
  const Shard::Shape& shape = shard().shape();
  const size_t from = shape.begin + block_ * shard().block_count();
  const size_t to = std::min(from + shard().block_count(), shape.begin + shape.count);
  for_each_part(pieces_, from, to, item_bytes(shape.dtype),
                [&](size_t begin, std::byte* data, size_t count) {
                  action_(shard(), begin - shape.begin, data, count, begin + count == to);
                });
  ++block_;
  skip_empty();
  return true;
}

}  // namespace ringdl

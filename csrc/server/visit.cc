#include "server/visit.h"

#include <algorithm>
#include <utility>

namespace ringdl {

Visit::Visit(const std::vector<Shard>& shards, size_t shard_count, std::vector<Piece> pieces,
             size_t first, int rank, const Window* window, Action action)
    : shards_(shards),
      shard_count_(shard_count),
      pieces_(std::move(pieces)),
      first_(first),
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
  const size_t shard_begin = current() * shard_count_;
  const size_t from = shard_begin + block_ * shard().block_count();
  const size_t to = std::min(from + shard().block_count(), shard_begin + shard().shape().count);
  const auto ends_before = [&](const Piece& piece) { return piece.begin + piece.count <= from; };
  auto piece = std::ranges::partition_point(pieces_, ends_before);
  for (; piece != pieces_.end() && piece->begin < to; ++piece) {
    const size_t begin = std::max(from, piece->begin);
    const size_t end = std::min(to, piece->begin + piece->count);
    const size_t item = item_bytes(shard().shape().dtype);
    action_(shard(), begin - shard_begin, piece->data + (begin - piece->begin) * item, end - begin,
            end == to);
  }
  ++block_;
  skip_empty();
  return true;
}

}  // namespace ringdl

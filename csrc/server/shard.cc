#include "server/shard.h"

#include <array>
#include <cstring>

namespace ringdl {

size_t Shard::blocks_of(const Shape& shape) {
  const size_t bytes = shape.count * item_bytes(shape.dtype);
  return (bytes + kBlockBytes - 1) / kBlockBytes;
}

size_t Shard::head_bytes(const Shape& shape) { return kLineBytes * blocks_of(shape); }

size_t Shard::array_bytes(const Shape& shape) {
  const size_t bytes = shape.count * item_bytes(shape.dtype);
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

size_t Shard::bytes(const Shape& shape) {
  return head_bytes(shape) + array_bytes(shape) * static_cast<size_t>(1 + states_of(shape.rule));
}

Shard::Shard(std::byte* memory, const Shape& shape)
    : memory_(memory),
      shape_(shape),
      blocks_(blocks_of(shape)),
      values_(memory + head_bytes(shape)) {}

std::byte* Shard::state(int number, size_t begin) const {
  return values(begin) + array_bytes(shape_) * static_cast<size_t>(number + 1);
}

void Shard::update(const Update& how, size_t begin, const std::byte* gradient, size_t count,
                   bool is_last) const {
  Block& block = at_block(begin / block_count());
  std::array<std::byte*, kMostStates> states{};
  for (int i = 0; i < states_of(shape_.rule); ++i) states[static_cast<size_t>(i)] = state(i, begin);
  ringdl::update(shape_.dtype, how, block.updates + 1, values(begin), states, gradient, count);
  if (is_last) ++block.updates;
}

void Shard::fill(size_t begin, const std::byte* from, size_t count, bool is_last) const {
  const size_t bytes = count * item_bytes(shape_.dtype);
  std::memcpy(values(begin), from, bytes);
  for (int i = 0; i < states_of(shape_.rule); ++i) std::memset(state(i, begin), 0, bytes);
  if (is_last) at_block(begin / block_count()).updates = 0;
}

}  // namespace ringdl

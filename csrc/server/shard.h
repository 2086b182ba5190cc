#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "reduce/update.h"
#include "server/block_lock.h"

namespace ringdl {

/// A part of the parameters in memory that all its users see: a view.
///
/// ```
/// lock and count of each block | parameters | arrays of the rule
/// ```
///
/// Parameters are cut into blocks, each with a lock and the number of its updates.
class Shard {
 public:
  /// Elements are cut into blocks of so many bytes. A lock is passed on in about a microsecond, and
  /// a block of 256 KiB takes some 50 us; and it fits into a core's cache with its gradient.
  static constexpr size_t kBlockBytes = 256 << 10;

  struct Shape {
    DType dtype;
    size_t begin;  // among all parameters
    size_t count;
    Update::Rule rule;
  };

  static size_t bytes(const Shape& shape);

  /// @param memory  at a multiple of 64; all zeros in the beginning
  Shard(std::byte* memory, const Shape& shape);

  const Shape& shape() const { return shape_; }
  size_t blocks() const { return blocks_; }
  /// The number of elements of every block but the last one.
  size_t block_count() const { return kBlockBytes / item_bytes(shape_.dtype); }

  BlockLock& lock(size_t block) const { return at_block(block).lock; }

  /// Elements from `begin` on, counted in the shard, of one block whose lock is held.
  std::byte* values(size_t begin) const { return values_ + begin * item_bytes(shape_.dtype); }
  /// Updates elements of a block whose lock is held.
  /// @param is_last  whether this ends an update of the block
  void update(const Update& how, size_t begin, const std::byte* gradient, size_t count,
              bool is_last) const;
  /// Elements of such a block are these from now on, and were never updated. Arguments as above.
  void fill(size_t begin, const std::byte* from, size_t count, bool is_last) const;

 private:
  static constexpr size_t kLineBytes = 64;
  struct Block {
    BlockLock lock;
    uint64_t updates;  // guarded by the lock
  };

  std::byte* state(int number, size_t begin) const;
  Block& at_block(size_t block) const {
    return *reinterpret_cast<Block*>(memory_ + kLineBytes * block);
  }
  static size_t blocks_of(const Shape& shape);
  static size_t head_bytes(const Shape& shape);
  static size_t array_bytes(const Shape& shape);

  std::byte* memory_;
  Shape shape_;
  size_t blocks_;
  std::byte* values_;
};

}  // namespace ringdl

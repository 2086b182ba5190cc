// Arrays reduced in slots, by ranks that are objects of one thread and step in orders drawn from a
// seed: each is as far ahead of or behind the others as slots allow.

#include "collective/shared/slot_allreduce.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "base/buffer.h"
#include "check.h"

using namespace ringdl;
using Bytes = std::vector<std::byte>;

namespace {

constexpr uint64_t kInstances = 12;
constexpr size_t kSizes[] = {0, 2, 62, 64, 66, 4094, 4096, 9000, 40002, Slots::kPayloadBytes};

// 16-bit floats whose sum shows in which order, and how wide, it was taken.
Bytes values(uint64_t instance, int rank, size_t bytes) {
  Bytes array(bytes);
  std::mt19937_64 random(instance * 100 + static_cast<uint64_t>(rank));
  for (size_t i = 0; i + 1 < bytes; i += 2) {
    const auto bits = static_cast<uint16_t>(0x3000 + random() % 0x1000);
    std::memcpy(array.data() + i, &bits, sizeof(bits));
  }
  return array;
}

class Rank {
 public:
  Rank(std::vector<std::byte*> memory, int rank, uint64_t seed)
      : size_(static_cast<int>(memory.size())),
        rank_(rank),
        seed_(seed),
        slots_(std::make_shared<Slots>(std::move(memory), rank)) {}

  bool is_done() const { return instance_ == kInstances; }

  void step() {
    const size_t bytes = kSizes[(instance_ + seed_) % std::size(kSizes)];
    if (!allreduce_) {
      array_ = values(instance_, rank_, bytes);
      allreduce_.emplace(SlotCall{slots_, instance_, instance_}, array_.data(), bytes,
                         ReduceMany(DType::kFloat16, Reduction::kAverage, size_), rank_);
    }
    const Polled state = allreduce_->step(size_);
    if (state == Polled::kAwaitsRanks) return;
    CHECK(state == Polled::kDone);
    CHECK(array_ == expected(bytes));
    allreduce_.reset();
    ++instance_;
  }

 private:
  Bytes expected(size_t bytes) const {
    std::vector<Bytes> arrays;
    std::vector<const std::byte*> sources;
    for (int rank = 0; rank < size_; ++rank) arrays.push_back(values(instance_, rank, bytes));
    for (const Bytes& array : arrays) sources.push_back(array.data());
    Bytes result(bytes);
    std::byte* const target = result.data();
    ReduceMany(DType::kFloat16, Reduction::kAverage, size_)(sources, {&target, 1}, bytes);
    return result;
  }

  const int size_;
  const int rank_;
  const uint64_t seed_;
  std::shared_ptr<Slots> slots_;
  Bytes array_;
  std::optional<SmallAllreduce> allreduce_;
  uint64_t instance_ = 0;
};

void run(int size, uint64_t seed) {
  std::vector<Buffer> memory;
  std::vector<std::byte*> begins;
  for (int rank = 0; rank < size; ++rank) {
    memory.emplace_back(Slots::bytes());
    std::memset(memory.back().data(), 0, Slots::bytes());
    begins.push_back(memory.back().data());
  }
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<Rank>(begins, rank, seed));
  }
  std::mt19937_64 random(seed);
  int64_t steps = 0;
  while (!std::ranges::all_of(ranks, &Rank::is_done) && ++steps < 1'000'000) {
    Rank& rank = *ranks[random() % ranks.size()];
    if (!rank.is_done()) rank.step();
  }
  CHECK(std::ranges::all_of(ranks, &Rank::is_done));
}

}  // namespace

int main() {
  for (int size = 1; size <= 8; ++size) {
    for (uint64_t seed = 0; seed < 10; ++seed) run(size, seed);
  }
  return check::report();
}

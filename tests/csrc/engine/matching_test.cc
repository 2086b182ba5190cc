// Keys that were used: counted right, and in little room.

#include "engine/matching.h"

#include <malloc.h>

#include <cstdlib>
#include <map>
#include <new>
#include <random>

#include "check.h"

using namespace ringdl;

namespace {

size_t allocated = 0;  // bytes

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  allocated += malloc_usable_size(memory);
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr) allocated -= malloc_usable_size(memory);
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace {

void test_counts() {
  std::mt19937_64 random(1);
  std::map<uint64_t, uint64_t> wanted;
  UseCounts counts;
  CHECK_EQ(counts.of(7), 0u);
  for (int i = 0; i < 50000; ++i) {
    const uint64_t hash = i % 3 == 0 ? random() % 100 : random() >> random() % 64;
    counts.add(hash);
    ++wanted[hash];
    if (i % 1000 == 0) CHECK_EQ(counts.of(random()), 0u);
  }
  CHECK_EQ(counts.size(), wanted.size());
  for (const auto& [hash, uses] : wanted) CHECK_EQ(counts.of(hash), uses);
}

void test_names_take_little_room() {
  constexpr size_t kNames = 300000;
  const size_t before = allocated;
  Matching matching;
  for (size_t i = 0; i < kNames; ++i) {
    const Key key = matching.next(KeySpace::kName, hash_of("step " + std::to_string(i)));
    CHECK_EQ(key.instance, 0u);
    matching.advance(key);
  }
  CHECK_EQ(matching.keys(), kNames);
  CHECK((allocated - before) / kNames <= 27);
  CHECK_EQ(matching.next(KeySpace::kName, hash_of("step 5")).instance, 1u);
  CHECK_EQ(matching.next(KeySpace::kUnnamed, hash_of("step 5")).instance, 0u);
}

}  // namespace

int main() {
  test_counts();
  test_names_take_little_room();
  return check::report();
}

// Every collective of arrays on CUDA devices, by 1 to 4 ranks on two devices or on one each, over a
// pretended driver and a pretended NCCL (LD_LIBRARY_PATH), with what is queued carried out in a
// thousand orders. Arrays are written in streams of the caller's, which nobody waits for.

#include <dlfcn.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bucket/plan.h"
#include "collective/row_partition.h"
#include "cuda/executors.h"
#include "ranks.h"

using namespace ringdl;

namespace {

constexpr int64_t kTimeout = 60 * kSecond;
constexpr int kDevices = 4;
constexpr size_t kSlabBytes = 1 << 10;
constexpr size_t kWindowBytes = 4 << 20;

using Values = std::vector<int32_t>;

Values values_of(int rank, int64_t count, int64_t from = 0) {
  Values values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] = static_cast<int32_t>((from + i) * 7 + rank * 1000);
  }
  return values;
}

/// A rank's device, with a stream in which arrays are written.
class Side {
 public:
  Side(Driver& driver, int devices)
      : driver_(driver), device_(cuda::Device::of(driver.rank() % devices)) {
    const cuda::Device::Current current(device_);
    RINGDL_CUDA(device_.functions(), StreamCreateWithPriority, &stream_, cuda::kStreamNonBlocking,
                0);
  }
  ~Side() { device_.functions().StreamDestroy(stream_); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  Memory memory() const { return {MemoryKind::kDevice, device_.number()}; }
  void* stream() const { return stream_; }

  /// Copied later, from memory that is kept.
  void write(void* into, const Values& values) {
    kept_.push_back(std::make_unique<Values>(values));
    const cuda::Device::Current current(device_);
    RINGDL_CUDA(device_.functions(), MemcpyAsync, cuda::address_of(into),
                cuda::address_of(kept_.back()->data()), values.size() * sizeof(int32_t), stream_);
  }

  int32_t* array(const Values& values) {
    arrays_.push_back(device_.allocate(values.size() * sizeof(int32_t)));
    write(arrays_.back().get(), values);
    return reinterpret_cast<int32_t*>(arrays_.back().get());
  }

  Values read(const void* array, size_t count) {
    Values values(count);
    device_.copy(values.data(), array, count * sizeof(int32_t), stream_);
    return values;
  }

  Call call(Kind kind, std::vector<int64_t> shape, int root = -1) const {
    Call call{kind, DType::kInt32, Reduction::kSum, root, std::move(shape), ""};
    call.memory = memory();
    call.stream = stream_;
    return call;
  }

  std::shared_ptr<Work> wait(const Call& call, void* data) {
    const auto work = driver_.submit(call, data);
    driver_.wait(work, kTimeout);
    return work;
  }

  /// What a call has gathered, which is in the CPU's memory.
  Values gathered(const Call& call, void* data) {
    const auto work = wait(call, data);
    const Gathered* const its = work->collective->gathered();
    Values values(its == nullptr ? 0 : its->data.size() / sizeof(int32_t));
    if (!values.empty()) std::memcpy(values.data(), its->data.data(), its->data.size());
    return values;
  }

 private:
  Driver& driver_;
  cuda::Device& device_;
  cuda::Stream stream_ = nullptr;
  std::vector<std::unique_ptr<Values>> kept_;
  std::vector<std::shared_ptr<std::byte>> arrays_;
};

Values sums_of(int size, int64_t count) {
  Values sums(static_cast<size_t>(count), 0);
  for (int rank = 0; rank < size; ++rank) {
    const Values values = values_of(rank, count);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  }
  return sums;
}

void add(Values& values, const Values& more) {
  values.insert(values.end(), more.begin(), more.end());
}

void test_collectives(Driver& driver, int devices, std::mt19937& random) {
  Side side(driver, devices);
  const int rank = driver.rank();
  const int size = driver.size();
  const auto draw = [&](unsigned most) { return static_cast<int64_t>(random() % (most + 1)); };
  const int root = static_cast<int>(draw(static_cast<unsigned>(size - 1)));
  {  // two at once, of several slabs each; every other rank submits them the other way round
    const int64_t count = draw(1500);
    const int64_t other = draw(1500);
    int32_t* const first = side.array(values_of(rank, count));
    int32_t* const second = side.array(values_of(rank, other));
    const auto submit = [&](const char* name, int64_t size_of_it, int32_t* array) {
      Call call = side.call(Kind::kAllreduce, {size_of_it});
      call.name = name;
      return driver.submit(call, array);
    };
    std::vector<std::shared_ptr<Work>> works;
    if (rank % 2 == 1) works.push_back(submit("second", other, second));
    works.push_back(submit("first", count, first));
    if (rank % 2 == 0) works.push_back(submit("second", other, second));
    for (const auto& work : works) driver.wait(work, kTimeout);
    CHECK(side.read(first, static_cast<size_t>(count)) == sums_of(size, count));
    CHECK(side.read(second, static_cast<size_t>(other)) == sums_of(size, other));
  }
  {
    const int64_t count = draw(1500);
    int32_t* const array = side.array(values_of(rank, count));
    side.wait(side.call(Kind::kBroadcast, {count}, root), array);
    CHECK(side.read(array, static_cast<size_t>(count)) == values_of(root, count));
  }
  {
    const int64_t rows = draw(50);
    const auto part = row_partition(rows, 3 * sizeof(int32_t), size)[static_cast<size_t>(rank)];
    int32_t* const array = side.array(values_of(rank, rows * 3));
    int32_t* const output = side.array(Values(part.bytes / sizeof(int32_t), -1));
    Call call = side.call(Kind::kReduceScatter, {rows, 3});
    call.output = output;
    side.wait(call, array);
    const Values all = sums_of(size, rows * 3);
    const auto begin = all.begin() + static_cast<int64_t>(part.begin / sizeof(int32_t));
    const Values expected(begin, begin + static_cast<int64_t>(part.bytes / sizeof(int32_t)));
    CHECK(side.read(output, expected.size()) == expected);
  }
  const auto rows_of_rank = [&, most = draw(30)](int of) { return (most + of * 5) % 31; };
  Values all;
  for (int other = 0; other < size; ++other) add(all, values_of(other, 2 * rows_of_rank(other)));
  int32_t* const own = side.array(values_of(rank, 2 * rows_of_rank(rank)));
  CHECK(side.gathered(side.call(Kind::kAllgather, {rows_of_rank(rank), 2}), own) == all);
  const Values at_root =
      side.gathered(side.call(Kind::kGather, {rows_of_rank(rank), 2}, root), own);
  CHECK(at_root == (rank == root ? all : Values()));
  const auto rows_to = [&](int from, int to) { return (from + 2 * to) % 4; };
  {
    Call call = side.call(Kind::kAlltoall, {0, 2});
    Values given, expected;
    for (int other = 0; other < size; ++other) {
      call.splits.push_back(rows_to(rank, other));
      call.shape[0] += rows_to(rank, other);
      add(given, values_of(rank, 2 * rows_to(rank, other), 100 * other));
      add(expected, values_of(other, 2 * rows_to(other, rank), 100 * rank));
    }
    CHECK(side.gathered(call, side.array(given)) == expected);
  }
  {
    Call call = side.call(Kind::kScatter, {0, 2}, root);
    Values given;
    for (int other = 0; rank == root && other < size; ++other) {
      call.splits.push_back(rows_to(root, other));
      call.shape[0] += rows_to(root, other);
      add(given, values_of(root, 2 * rows_to(root, other), 100 * other));
    }
    CHECK(side.gathered(call, side.array(given)) ==
          values_of(root, 2 * rows_to(root, rank), 100 * rank));
  }
  side.wait(side.call(Kind::kBarrier, {}), nullptr);
}

std::vector<float> floats_of(int rank, size_t gradient, int turn, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(
        (i * 3 + static_cast<size_t>(rank) * 7 + gradient + static_cast<size_t>(turn)) % 100);
  }
  if (turn == 3 && rank == 0) values[0] = std::numeric_limits<float>::infinity();
  return values;
}

std::unique_ptr<GradientBuckets> make_buckets(const std::shared_ptr<Driver>& driver,
                                              const std::vector<GradientSpec>& specs,
                                              const Side& side, int64_t first_number) {
  return check::make_buckets(driver, specs, plan_buckets(specs, 1000, 500), first_number,
                             Reduction::kSum, side.memory());
}

// Rounds of gradients, of which one is missing on one rank and another one on all.
void test_buckets(const std::shared_ptr<Driver>& driver, int devices, std::mt19937& random) {
  Side side(*driver, devices);
  std::vector<GradientSpec> specs;
  for (int i = 0; i < 5; ++i) {
    const auto count = static_cast<int64_t>(1 + random() % 300);
    specs.push_back({"gradient " + std::to_string(i), {count}, DType::kFloat32, {}});
  }
  const auto buckets = make_buckets(driver, specs, side, 0);
  CHECK(buckets->packs());
  const int size = driver->size();
  buckets->count_non_finite();
  for (int turn = 0; turn < 4; ++turn) {
    uint64_t non_finite = 0;
    const auto is_missing = [&](size_t gradient, int rank) {
      return gradient == 1 || (gradient == 3 && rank == turn % size);
    };
    for (size_t i = 0; i < specs.size(); ++i) {
      if (is_missing(i, driver->rank())) continue;
      const std::vector<float> floats = floats_of(driver->rank(), i, turn, specs[i].shape[0]);
      Values bits(floats.size());
      std::memcpy(bits.data(), floats.data(), bits.size() * sizeof(float));
      non_finite += turn == 3 && driver->rank() == 0;
      const auto index = static_cast<int>(i);
      if (i % 2 == 0) {
        side.write(buckets->gradient(index), bits);
        buckets->ready(index, side.stream());
        continue;
      }
      int32_t* const elsewhere = side.array(bits);
      const bool is_launched = buckets->ready(
          index, side.stream(),
          GradientBuckets::Source{reinterpret_cast<std::byte*>(elsewhere), DType::kFloat32, 0.5});
      if (is_launched) side.write(elsewhere, Values(bits.size(), -1));
    }
    const std::vector<bool> produced = buckets->wait(kTimeout, {}, true, side.stream());
    for (size_t i = 0; i < specs.size(); ++i) {
      std::vector<float> sums(static_cast<size_t>(specs[i].shape[0]), 0.0f);
      bool is_produced = false;
      for (int rank = 0; rank < size; ++rank) {
        if (is_missing(i, rank)) continue;
        is_produced = true;
        const std::vector<float> floats = floats_of(rank, i, turn, specs[i].shape[0]);
        const float scale = i % 2 == 0 ? 1.0f : 0.5f;
        for (size_t k = 0; k < sums.size(); ++k) sums[k] += scale * floats[k];
      }
      CHECK_EQ(produced[i], is_produced);
      const Values found = side.read(buckets->gradient(static_cast<int>(i)), sums.size());
      CHECK(std::memcmp(found.data(), sums.data(), sums.size() * sizeof(float)) == 0);
      if (turn < 3) continue;
      const auto unpacked = side.array(Values(sums.size(), -1));
      const GradientBuckets::Target target{static_cast<int>(i),
                                           reinterpret_cast<std::byte*>(unpacked), DType::kFloat32};
      buckets->unpack(side.stream(), {&target, 1}, 2.0);
      for (float& sum : sums) sum *= 2.0f;
      const Values doubled = side.read(unpacked, sums.size());
      CHECK(std::memcmp(doubled.data(), sums.data(), sums.size() * sizeof(float)) == 0);
    }
    CHECK_EQ(buckets->non_finite(), non_finite);
  }
}

// The last rank has no data any more: it answers with zeros, on its device.
void test_join(const std::shared_ptr<Driver>& driver, int devices, std::mt19937& random) {
  const int last = driver->size() - 1;
  if (last == 0) return;
  Side side(*driver, devices);
  const auto count = static_cast<int64_t>(1 + random() % 1500);
  const std::vector<GradientSpec> specs = {{"gradient", {count}, DType::kFloat32, {}}};
  const auto buckets = make_buckets(driver, specs, side, 100);
  for (int turn = 0; driver->rank() != last && turn < 3; ++turn) {
    int32_t* const array = side.array(values_of(driver->rank(), count));
    side.wait(side.call(Kind::kAllreduce, {count}), array);
    CHECK(side.read(array, static_cast<size_t>(count)) == sums_of(last, count));
    const auto bytes = static_cast<size_t>(count) * sizeof(int32_t);
    const auto reached = driver->devices().allocate(side.memory().device, bytes);
    side.write(reached.get(), values_of(driver->rank(), count));
    side.wait(side.call(Kind::kAllreduce, {count}), reached.get());
    CHECK(side.read(reached.get(), static_cast<size_t>(count)) == sums_of(last, count));
    side.write(buckets->gradient(0), Values(static_cast<size_t>(count), 0x3f800000));  // 1.0
    buckets->ready(0, side.stream());
    CHECK(buckets->wait(kTimeout, {}, true, side.stream())[0]);
    const auto sum = static_cast<float>(last);
    CHECK(side.read(buckets->gradient(0), static_cast<size_t>(count)) ==
          Values(static_cast<size_t>(count), std::bit_cast<int32_t>(sum)));
  }
  driver->join(kTimeout);
}

void seed_driver(unsigned seed) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  if (library == nullptr) return;
  const auto set = std::bit_cast<void (*)(unsigned)>(dlsym(library, "ringdl_pretended_seed"));
  CHECK(set != nullptr);
  if (set != nullptr) set(seed);
}

// A build without nvcc has none; the pretended driver takes any.
void load_kernels() {
  for (int number = 0; number < kDevices; ++number) {
    cuda::Device& device = cuda::Device::of(number);
    if (!device.load_kernels().empty()) device.use_kernels("pretended");
  }
}

void test(unsigned seed) {
  seed_driver(seed);
  const int size = 1 + static_cast<int>(seed % 4);
  const bool shares_memory = seed / 4 % 2 == 0;
  const int devices = seed / 8 % 2 == 0 ? kDevices : 2;
  const bool takes_nccl = seed / 16 % 2 == 0;
  const auto windows = check::connected_windows(size, kWindowBytes);
  EngineOptions options;
  options.segment_bytes = 512;
  options.slab_bytes = kSlabBytes;
  check::run_drivers(
      size, options, {.delay_seed = seed + 1},
      [&](const std::shared_ptr<Driver>& driver) {
        const auto rank = static_cast<size_t>(driver->rank());
        if (shares_memory) {
          driver->set_window(windows[rank], std::vector<int>(static_cast<size_t>(size), 0));
        }
        if (takes_nccl) driver->set_choice(default_costs(), Algorithm::kNccl, 0);
        std::mt19937 random(seed);  // the same on all ranks
        test_collectives(*driver, devices, random);
        test_buckets(driver, devices, random);
        test_join(driver, devices, random);
      },
      {}, [](int) { return std::make_shared<cuda::Executors>(); });
}

}  // namespace

int main() {
  load_kernels();
  const char* const seeds = std::getenv("RINGDL_TEST_SEEDS");
  for (unsigned seed = 0; seed < (seeds != nullptr ? std::stoul(seeds) : 1000); ++seed) test(seed);
  return ringdl::check::report();
}

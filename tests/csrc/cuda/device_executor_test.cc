// The executor of devices, over a pretended driver, or with RINGDL_TEST_DRIVER=real on device 0:
// the same bits as the CPU's for every dtype, reduction, odd size and misalignment; nothing seen
// before its ticket is done.

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "cuda/executor.h"
#include "cuda/pack.h"
#include "cuda/pretended_driver.h"
#include "reduce/finite.h"

using namespace ringdl;
using namespace ringdl::cuda;

namespace {

void wait(DeviceExecutor& executor, Executor::Ticket ticket) {
  while (!executor.is_done(ticket)) {
  }
}

void test_reductions(Device& device) {
  DeviceExecutor executor(device);
  std::mt19937_64 random(3);
  constexpr size_t kMost = 5001 * 8 + 64;
  std::vector<std::shared_ptr<std::byte>> memory;
  for (int i = 0; i < 6; ++i) memory.push_back(device.allocate(kMost));
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int r = 0; r < kReductionCount; ++r) {
      const auto reduction = static_cast<Reduction>(r);
      if (!has_reduction(dtype, reduction)) continue;
      for (const size_t count : {0, 1, 3, 64, 1000, 5001}) {
        for (const size_t shift : {0, 1, 2, 3}) {  // elements from a vector's boundary
          for (const size_t sources_count : {1, 2, 3, 5}) {
            const size_t bytes = count * item_bytes(dtype);
            std::vector<std::vector<std::byte>> arrays;
            std::vector<const std::byte*> expected_from, from;
            std::vector<std::byte*> into;
            for (size_t s = 0; s < sources_count; ++s) {
              arrays.emplace_back(bytes);
              for (auto& byte : arrays.back()) byte = static_cast<std::byte>(random());
              std::byte* const on_device = memory[s].get() + shift * item_bytes(dtype);
              wait(executor, executor.copy(on_device, arrays.back().data(), bytes, false));
              from.push_back(on_device);
              into.push_back(on_device);
            }
            for (const auto& array : arrays) expected_from.push_back(array.data());
            into.push_back(memory[5].get() + shift * item_bytes(dtype));
            std::vector<std::byte> expected(bytes), result(bytes);
            std::byte* const target = expected.data();
            const ReduceMany reduce_many(dtype, reduction, static_cast<int64_t>(sources_count));
            reduce_many(expected_from, {&target, 1}, bytes);
            executor.reduce(reduce_many, from, into, bytes, false);
            for (std::byte* const each : into) {
              wait(executor, executor.copy(result.data(), each, bytes, false));
              CHECK(bytes == 0 || std::memcmp(result.data(), expected.data(), bytes) == 0);
            }
          }
        }
      }
    }
  }
}

void test_combinations(Device& device) {
  DeviceExecutor executor(device);
  constexpr size_t kBytes = 1000;
  const auto a = device.allocate(kBytes);
  const auto b = device.allocate(kBytes);
  for (const bool is_last : {false, true}) {
    std::vector<std::byte> x(kBytes), y(kBytes), result(kBytes);
    for (size_t i = 0; i < kBytes; ++i) {
      x[i] = static_cast<std::byte>(i * 7);
      y[i] = static_cast<std::byte>(i * 5 + 1);
    }
    executor.copy(a.get(), x.data(), kBytes, false);
    wait(executor, executor.copy(b.get(), y.data(), kBytes, false));
    const Reducer reducer(DType::kInt16, Reduction::kAverage, 3);
    if (is_last) {
      executor.finish(reducer, a.get(), b.get(), kBytes);
      reducer.finish(x.data(), y.data(), kBytes);
    } else {
      executor.combine(reducer, a.get(), b.get(), kBytes);
      reducer.combine(x.data(), y.data(), kBytes);
    }
    wait(executor, executor.copy(result.data(), a.get(), kBytes, false));
    CHECK(result == x);
  }
}

void test_codecs(Device& device) {
  DeviceExecutor executor(device);
  std::vector<float> floats(4099);
  std::mt19937 random(5);
  for (auto& each : floats) each = std::bit_cast<float>(static_cast<uint32_t>(random()));
  const size_t bytes = floats.size() * sizeof(float);
  const auto array = device.allocate(bytes);
  const auto wire = device.allocate(bytes / 2);
  for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
    const Codec codec(narrow);
    std::vector<std::byte> expected(bytes / 2), packed(bytes / 2);
    std::vector<std::byte> expected_array(bytes), unpacked(bytes);
    const auto* const from = reinterpret_cast<const std::byte*>(floats.data());
    codec.pack(expected.data(), from, bytes);
    codec.unpack(expected_array.data(), expected.data(), bytes);
    executor.copy(array.get(), from, bytes, false);
    executor.pack(codec, wire.get(), array.get(), bytes);
    executor.unpack(codec, array.get(), wire.get(), bytes);
    executor.copy(packed.data(), wire.get(), bytes / 2, false);
    wait(executor, executor.copy(unpacked.data(), array.get(), bytes, false));
    CHECK(packed == expected);
    CHECK(unpacked == expected_array);
  }
}

float as_float(DType dtype, const std::byte* at) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  float value = 0;
  Codec(dtype).unpack(reinterpret_cast<std::byte*>(&value), at, sizeof(value));
  return value;
}

// Many arrays of odd sizes at odd places by one launch, cast and multiplied as the codec would; and
// those counted that are not finite.
void test_packing(Device& device) {
  std::mt19937 random(11);
  struct Casting {
    DType from, to;
  };
  const DType narrow[] = {DType::kFloat16, DType::kBFloat16};
  std::vector<Casting> castings = {{DType::kFloat64, DType::kFloat64},
                                   {DType::kFloat32, DType::kFloat32}};
  for (const DType each : narrow) {
    castings.push_back({each, each});
    castings.push_back({DType::kFloat32, each});
    castings.push_back({each, DType::kFloat32});
  }
  std::vector<size_t> counts = {0, 1, 8191, 8192, 8193, 20'000};
  for (int i = 0; i < 300; ++i) counts.push_back(random() % 300);
  for (const auto& [from, to] : castings) {
    for (const double scale : {1.0, 0.25, 1.0 / 3}) {
      for (const size_t shift : {0, 1}) {  // elements from a vector's boundary
        size_t elements = 0;
        std::vector<size_t> begins;
        for (const size_t count : counts) {
          begins.push_back(elements);
          elements += (count + 31) / 32 * 32 + 32;
        }
        std::vector<std::byte> values(elements * item_bytes(from));
        std::vector<std::byte> packed(elements * item_bytes(to), std::byte{1});
        for (auto& byte : values) byte = static_cast<std::byte>(random());
        const auto sources = device.allocate(values.size());
        const auto targets = device.allocate(packed.size());
        device.copy(sources.get(), values.data(), values.size());
        device.copy(targets.get(), packed.data(), packed.size());
        std::vector<std::byte> expected = packed;
        std::vector<PackItem> items;
        for (size_t i = 0; i < counts.size(); ++i) {
          const size_t begin = begins[i] + shift;
          items.push_back({sources.get() + begin * item_bytes(from),
                           targets.get() + begin * item_bytes(to), counts[i]});
          for (size_t k = begin; k < begin + counts[i]; ++k) {
            const std::byte* const source = &values[k * item_bytes(from)];
            std::byte* const target = &expected[k * item_bytes(to)];
            if (from == to && scale == 1) {
              std::memcpy(target, source, item_bytes(to));
            } else if (from == DType::kFloat64) {
              double value = 0;
              std::memcpy(&value, source, sizeof(value));
              value *= scale;
              if (value != value) value = std::bit_cast<double>(0x7ff8000000000000);
              std::memcpy(target, &value, sizeof(value));
            } else {
              float value = as_float(from, source) * static_cast<float>(scale);
              if (value != value) value = std::bit_cast<float>(0x7fc00000);
              if (to == DType::kFloat32) {
                std::memcpy(target, &value, sizeof(value));
              } else {
                Codec(to).pack(target, reinterpret_cast<const std::byte*>(&value), sizeof(value));
              }
            }
          }
        }
        pack(device, nullptr, {from, to, scale}, items);
        device.synchronize();
        device.copy(packed.data(), targets.get(), packed.size());
        CHECK(packed == expected);

        uint64_t non_finite = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          const std::byte* const its = &expected[(begins[i] + shift) * item_bytes(to)];
          non_finite += count_non_finite(to, its, counts[i]);
        }
        CHECK(non_finite > 0);
        const std::shared_ptr<uint64_t> counter = device.counter();
        for (PackItem& item : items) item.to = nullptr;
        for (const uint64_t times : {1, 2}) {
          pack(device, nullptr, {from, to, scale, counter.get()}, items);
          device.synchronize();
          CHECK_EQ(*counter, times * non_finite);
        }
      }
    }
  }
  const PackItem item{nullptr, nullptr, 1};
  try {
    pack(device, nullptr, {DType::kFloat16, DType::kBFloat16}, {&item, 1});
    CHECK(false);
  } catch (const UsageError& error) {
    CHECK_EQ(std::string(error.what()), "a device does not pack float16 as bfloat16");
  }
}

// What a caller has queued in a stream of its own comes before, and what it queues then, after.
void test_streams(Device& device) {
  const Functions& its = device.functions();
  DeviceExecutor executor(device);
  Stream stream = nullptr;
  {
    const Device::Current current(device);
    RINGDL_CUDA(its, StreamCreateWithPriority, &stream, kStreamNonBlocking, 0);
  }
  constexpr size_t kBytes = 1 << 16;
  const auto memory = device.allocate(kBytes);
  const auto copied = device.allocate(kBytes);
  const auto other = device.allocate(kBytes);
  for (int i = 0; i < 200; ++i) {
    const auto value = static_cast<unsigned char>(i);
    std::vector<std::byte> result(kBytes);
    {
      const Device::Current current(device);
      RINGDL_CUDA(its, MemsetD8Async, address_of(memory.get()), value, kBytes, stream);
    }
    const auto mark = device.mark(stream);
    {
      const Device::Current current(device);
      RINGDL_CUDA(its, MemcpyAsync, address_of(other.get()), address_of(memory.get()), kBytes,
                  stream);
    }
    while (!mark->is_passed()) {
    }
    executor.copy(copied.get(), memory.get(), kBytes, false);
    wait(executor, executor.copy(result.data(), copied.get(), kBytes, false));
    device.synchronize();
    CHECK(std::ranges::count(result, std::byte{value}) == kBytes);
  }
}

// A user's reduction, of arrays that are targets as well, all or some, and in other orders.
void test_custom(Device& device) {
  const CustomKernel kernel = [](void* into, const void* from, int64_t count) {
    auto* const a = static_cast<int32_t*>(into);
    const auto* const b = static_cast<const int32_t*>(from);
    for (int64_t i = 0; i < count; ++i) a[i] = 2 * a[i] + b[i];  // the order matters
  };
  DeviceExecutor executor(device);
  constexpr size_t kCount = 1001;
  constexpr size_t kArrays = 4;
  std::vector<std::shared_ptr<std::byte>> arrays;
  for (size_t i = 0; i < kArrays; ++i) arrays.push_back(device.allocate(kCount * sizeof(int32_t)));
  const auto reduce = [&](std::vector<size_t> from, std::vector<size_t> to) {
    std::vector<std::vector<int32_t>> values;
    for (size_t i = 0; i < kArrays; ++i) {
      values.emplace_back(kCount, static_cast<int32_t>(i + 1));
      executor.copy(arrays[i].get(), reinterpret_cast<std::byte*>(values[i].data()),
                    kCount * sizeof(int32_t), false);
      wait(executor, executor.last());
    }
    std::vector<const std::byte*> sources;
    std::vector<std::byte*> targets;
    for (const size_t i : from) sources.push_back(arrays[i].get());
    for (const size_t i : to) targets.push_back(arrays[i].get());
    executor.reduce(ReduceMany(DType::kInt32, kernel), sources, targets, kCount * sizeof(int32_t),
                    false);
    auto wanted = static_cast<int32_t>(from[0] + 1);
    for (size_t i = 1; i < from.size(); ++i)
      wanted = 2 * wanted + static_cast<int32_t>(from[i] + 1);
    for (size_t i = 0; i < kArrays; ++i) {
      std::vector<int32_t> found(kCount);
      wait(executor, executor.copy(reinterpret_cast<std::byte*>(found.data()), arrays[i].get(),
                                   kCount * sizeof(int32_t), false));
      const bool is_target = std::ranges::count(to, i) > 0;
      CHECK(found == std::vector<int32_t>(kCount, is_target ? wanted : values[i][0]));
    }
  };
  CHECK(device.custom(kernel) == nullptr);
  try {
    reduce({0, 1}, {0});
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(std::string(error.what()), "the device lacks a custom_op");
  }
  const auto address = reinterpret_cast<uintptr_t>(kernel);
  device.use_custom(kernel, "custom " + std::to_string(address), "op");
  reduce({0, 1, 2, 3}, {0, 1, 2, 3});
  reduce({2, 0, 1}, {2, 0, 1});
  reduce({2, 0, 1}, {0, 1, 2});
  reduce({0, 1}, {3, 1});
  reduce({0, 1, 2}, {3});
  reduce({3}, {1, 3});
}

void test_errors(Device& device) {
  pretended_fail_next("cuMemAlloc", kOutOfMemory);
  try {
    device.allocate(1 << 20);
    CHECK(false);
  } catch (const OutOfMemory& error) {
    CHECK(std::string(error.what()).starts_with("CUDA device 0 has no room for 1048576 bytes"));
  }
  CHECK_EQ(pretended_used(0), 0u);
  DeviceExecutor executor(device);
  const auto memory = device.allocate(64);
  const Executor::Ticket ticket = executor.copy(memory.get(), memory.get() + 32, 32, false);
  pretended_break(719);
  try {
    wait(executor, ticket);
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(std::string(error.what()), "cuEventRecord: unspecified launch failure");
  }
  pretended_break(kSuccess);
}

}  // namespace

int main() {
  static const int image = 0;
  const char* const wanted = std::getenv("RINGDL_TEST_DRIVER");
  const bool is_real = wanted != nullptr && std::string(wanted) == "real";
  std::optional<Device> pretended;
  if (!is_real) pretended.emplace(pretended_functions(), 0, &image);
  Device& device = is_real ? Device::of(0) : *pretended;
  CHECK_EQ(device.load_kernels(), "");
  test_reductions(device);
  test_combinations(device);
  test_codecs(device);
  test_packing(device);
  test_streams(device);
  if (!is_real) {
    test_custom(device);
    test_errors(device);
  }
  return check::report();
}

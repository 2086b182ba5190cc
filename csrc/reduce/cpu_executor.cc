#include <cstring>

#include "reduce/executor.h"
#include "reduce/streaming.h"

namespace ringdl {
namespace {

bool is_float32_or_narrower(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

class CpuExecutor final : public Executor {
 public:
  bool is_immediate() const override { return true; }

  Ticket copy(std::byte* into, const std::byte* from, size_t bytes, bool streams) override {
    if (bytes == 0) return kDone;  // pointers may be null
    if (streams) {
      stream_copy(into, from, bytes);
      stream_fence();
    } else {
      std::memcpy(into, from, bytes);
    }
    return kDone;
  }

  Ticket zero(std::byte* into, size_t bytes) override {
    if (bytes > 0) std::memset(into, 0, bytes);
    return kDone;
  }

  Ticket combine(const Reducer& reducer, std::byte* into, const std::byte* from,
                 size_t bytes) override {
    reducer.combine(into, from, bytes);
    return kDone;
  }

  Ticket finish(const Reducer& reducer, std::byte* into, const std::byte* from,
                size_t bytes) override {
    reducer.finish(into, from, bytes);
    return kDone;
  }

  Ticket reduce(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                std::span<std::byte* const> targets, size_t bytes, bool streams) override {
    reduce_many(sources, targets, bytes, streams);
    return kDone;
  }

  Ticket pack(const Codec& codec, std::byte* wire, const std::byte* array, size_t bytes) override {
    codec.pack(wire, array, bytes);
    return kDone;
  }

  Ticket unpack(const Codec& codec, std::byte* array, const std::byte* wire,
                size_t bytes) override {
    codec.unpack(array, wire, bytes);
    return kDone;
  }

 protected:
  bool poll(Ticket) override { return true; }
};

}  // namespace

// float16 to bfloat16 is nothing that anybody needs.
bool can_pack(DType from, DType to) {
  if (from == to) return is_float32_or_narrower(to) || to == DType::kFloat64;
  return is_float32_or_narrower(from) && is_float32_or_narrower(to) &&
         (from == DType::kFloat32 || to == DType::kFloat32);
}

Executor& cpu_executor() {
  static auto* const executor = new CpuExecutor;
  return *executor;
}

}  // namespace ringdl

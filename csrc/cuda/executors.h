#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "cuda/executor.h"
#include "cuda/nccl.h"
#include "cuda/pack.h"
#include "cuda/pinned.h"
#include "cuda/shared_blocks.h"

namespace ringdl::cuda {

/// The executors of one engine: two streams of its own on each device that it meets arrays of.
/// Threads: one at a time.
class Executors final : public DeviceExecutors {
 public:
  Executor& of(int device) override { return made(first_, device); }
  Executor& second_of(int device) override { return made(second_, device); }
  std::unique_ptr<Mark> mark(int device, void* stream) override {
    return Device::of(device).mark(static_cast<Stream>(stream));
  }
  bool packs(int device) override { return has_kernels(device); }
  void pack(int device, void* stream, const Packing& how,
            std::span<const PackItem> items) override {
    cuda::pack(Device::of(device), static_cast<Stream>(stream), how, items);
  }
  std::shared_ptr<uint64_t> counter(int device) override { return Device::of(device).counter(); }
  void synchronize() override {
    std::vector<int> met;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [device, executor] : first_) met.push_back(device);
    }
    for (const int device : met) Device::of(device).synchronize();
  }
  std::shared_ptr<std::byte> allocate(int device, size_t bytes) override {
    std::shared_ptr<std::byte> memory =
        blocks_->take(Device::of(device), bytes, SharedBlocks::Use::kCaller);
    Device::of(device).zero(memory.get(), bytes);
    return memory;
  }
  std::shared_ptr<std::byte> device_stage(int device, size_t bytes) override {
    return blocks_->take(Device::of(device), bytes, SharedBlocks::Use::kExecutor);
  }
  void use_no_peers() override { has_peers_ = false; }
  DevicePlace place_of(int device, const std::byte* data, size_t bytes) override {
    return has_peers_ && has_kernels(device) ? blocks_->place_of(data, bytes) : DevicePlace();
  }
  std::byte* reached(int device, const DevicePlace& place) override {
    return place && has_kernels(device) ? reached_.reach(Device::of(device), place) : nullptr;
  }
  void keep(std::shared_ptr<std::byte> memory) override { kept_.push_back(std::move(memory)); }
  bool has_custom(int device, CustomKernel kernel) override {
    return Device::of(device).custom(kernel) != nullptr;
  }
  bool library_reduces(DType dtype, Reduction reduction) override {
    return reduces_by_nccl(dtype, reduction);
  }
  DeviceLibrary& library(uint64_t group, int rank, int size, int device) override {
    std::unique_ptr<NcclGroup>& its = nccl_[group];
    if (!its) its = std::make_unique<NcclGroup>(Device::of(device), rank, size);
    return *its;
  }
  void close_libraries() override { nccl_.clear(); }
  void let_go() override {
    reached_.let_go();
    kept_.clear();
  }
  std::shared_ptr<std::byte> pinned(int device, size_t bytes, const Allocate& allocate) override {
    return pin(Device::of(device), bytes, allocate);
  }
  std::shared_ptr<std::byte> stage(int device, size_t bytes, const Allocate& allocate) override {
    return stages_->take(Device::of(device), bytes, allocate);
  }

 private:
  using ByDevice = std::map<int, std::unique_ptr<DeviceExecutor>>;

  static bool has_kernels(int device) { return Device::of(device).load_kernels().empty(); }

  Executor& made(ByDevice& executors, int device) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<DeviceExecutor>& executor = executors[device];
    if (!executor) executor = std::make_unique<DeviceExecutor>(Device::of(device));
    return *executor;
  }

  std::atomic<bool> has_peers_ = true;
  std::mutex mutex_;
  ByDevice first_, second_;
  const std::shared_ptr<StagePool> stages_ = std::make_shared<StagePool>();
  const std::shared_ptr<SharedBlocks> blocks_ = std::make_shared<SharedBlocks>();
  ReachedBlocks reached_;
  std::map<uint64_t, std::unique_ptr<NcclGroup>> nccl_;  // by group
  std::vector<std::shared_ptr<std::byte>> kept_;
};

}  // namespace ringdl::cuda

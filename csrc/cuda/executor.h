#pragma once

#include "cuda/queue.h"
#include "reduce/executor.h"

namespace ringdl::cuda {

/// Copies and reduces on a device, in a stream of its own. Arrays may lie on this device, on others
/// that it can reach, or in pinned memory. Tickets are those of a Queue.
class DeviceExecutor final : public Executor {
 public:
  explicit DeviceExecutor(Device& device) : device_(device), queue_(device) {}

  /// A launch takes some microseconds, in which a device moves megabytes.
  Grain grain() const override { return {256 << 10, 16 << 20, 1 << 20, 8 << 20}; }
  size_t most_arrays() const override;

  Ticket last() const override { return queue_.last(); }
  Ticket copy(std::byte* into, const std::byte* from, size_t bytes, bool streams) override;
  Ticket zero(std::byte* into, size_t bytes) override;
  Ticket combine(const Reducer& reducer, std::byte* into, const std::byte* from,
                 size_t bytes) override;
  Ticket finish(const Reducer& reducer, std::byte* into, const std::byte* from,
                size_t bytes) override;
  Ticket reduce(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                std::span<std::byte* const> targets, size_t bytes, bool streams) override;
  Ticket pack(const Codec& codec, std::byte* wire, const std::byte* array, size_t bytes) override;
  Ticket unpack(const Codec& codec, std::byte* array, const std::byte* wire, size_t bytes) override;

 protected:
  bool poll(Ticket ticket) override { return queue_.is_done(ticket); }

 private:
  void launch(DType dtype, Reduction reduction, int64_t divisor,
              std::span<const std::byte* const> sources, std::span<std::byte* const> targets,
              size_t bytes);
  void launch(const std::string& kernel, void* arguments, size_t items);
  void launch(Function function, void** parameters, size_t items);
  void launch_custom(CustomKernel kernel, DType dtype, std::byte* into, const std::byte* from,
                     size_t bytes);
  void reduce_custom(const ReduceMany& reduce_many, std::span<const std::byte* const> sources,
                     std::span<std::byte* const> targets, size_t bytes);

  Device& device_;
  Queue queue_;
};

}  // namespace ringdl::cuda

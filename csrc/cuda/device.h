#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "reduce/executor.h"

namespace ringdl::cuda {

/// A CUDA device of this process: its primary context, which is also what torch, CuPy, Numba and
/// JAX use, so their pointers and streams are valid here.
///
/// Threads: any. Its context is made current for each call and then no longer.
class Device {
 public:
  /// The context is made, if nobody has made it yet: some hundred MB of the device's memory.
  /// @param functions  outlive it
  /// @param image  the compiled kernels; null: there are none
  /// @throws Error  there is no such device, or it cannot be used
  Device(const Functions& functions, int number, const void* image);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  /// Those of the machine's driver, made by the first call and kept for good.
  /// @throws UsageError  no driver, or no such device
  static Device& of(int number);

  /// The number of the device whose memory this is; 0 for null, where an empty array may lie.
  /// @throws UsageError  no driver, or no memory of a device
  static int number_of(const void* memory);

  const Functions& functions() const { return functions_; }
  int number() const { return number_; }

  /// Makes the device's context current in this thread, as long as this lives; and calls that
  /// allocate or ask are no error meanwhile where some other stream is being captured.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Functions& functions_;
    CaptureMode mode_ = CaptureMode::kRelaxed;
  };

  /// What is in a stream now: see DeviceExecutors::mark().
  std::unique_ptr<Mark> mark(Stream stream);

  /// Whether its kernels can use the memory of another device of this process, from now on.
  bool reaches(int other) const;

  /// Memory of the device, of any content, whose handle may be given to other processes.
  /// @throws OutOfMemory
  std::shared_ptr<std::byte> allocate(size_t bytes);

  /// Of the CPU's memory, zero, which kernels may add to.
  /// @throws OutOfMemory
  std::shared_ptr<uint64_t> counter() const;

  /// Copies within this device, or between it and the CPU's memory, after what is in `stream`, and
  /// waits for it.
  /// @throws DeviceError
  void copy(void* into, const void* from, size_t bytes, Stream stream) const;
  /// The same of memory that no stream uses.
  void copy(void* into, const void* from, size_t bytes) const { copy(into, from, bytes, own_); }
  void zero(void* memory, size_t bytes) const;
  /// Waits for all streams.
  void synchronize() const;

  /// Loads the kernels of this build, which takes some milliseconds at the first call. Empty if
  /// they can be used, else one sentence.
  std::string load_kernels();
  /// Uses kernels that were compiled elsewhere.
  /// @param image  as cuModuleLoadData() takes it
  /// @throws Error  the driver refuses it
  void use_kernels(const std::string& image);

  /// A kernel of kernels.inc.
  /// @throws Error  there are none that can be used
  Function kernel(const std::string& name);

  /// Takes a user's reduction, compiled for this device: a kernel of the CPU's kernel's parameters,
  /// whose threads share out the elements. Any thread; kept for good.
  /// @param on_cpu  the same one there
  /// @param image  as cuModuleLoadData() takes it
  /// @throws Error  the driver refuses it
  void use_custom(CustomKernel on_cpu, const std::string& image, const std::string& name);
  /// Null if there is none.
  Function custom(CustomKernel on_cpu);

 private:
  class EventMark;
  void load_own_kernels();

  const Functions& functions_;
  const int number_;
  const void* const image_;
  DeviceNumber handle_ = 0;
  Context context_ = nullptr;
  Stream own_ = nullptr;
  std::mutex mutex_;           // of what follows
  std::vector<Event> events_;  // not in use
  Module module_ = nullptr;
  std::string why_no_kernels_;
  std::map<std::string, Function> kernels_;
  std::map<CustomKernel, Function> customs_;
};

inline Address address_of(const void* data) { return reinterpret_cast<Address>(data); }

}  // namespace ringdl::cuda

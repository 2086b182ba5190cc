#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/memory.h"
#include "engine/driver.h"
#include "transport/shm/segment_window.h"

/// Shared by the files of the binding. Every call into the engine that takes its lock releases the
/// GIL: the thread that holds the lock may need the GIL, as a custom_op that raises does.
namespace ringdl::binding {

namespace nb = nanobind;

/// Any array that supports the buffer protocol or DLPack; taken without a copy.
using Array = nb::ndarray<nb::ro>;

/// An array as the engine takes it.
struct ArrayView {
  void* data;
  DType dtype;
  std::vector<int64_t> shape;
  Memory memory = {};
  void* stream = nullptr;  // of a device, as in Call
};

/// A contiguous array in a device's memory, as its framework describes it; unlike DLPack's exchange
/// this orders nothing in any stream.
struct DeviceArray {
  ArrayView view;
  nb::object owner;  // of the memory
};

/// @param dtype  what the elements are if the array cannot say so itself (bfloat16 as uint16)
/// @throws UsageError  not on the CPU, not contiguous, or of a dtype that is not reduced
ArrayView view_of(const Array& array, std::optional<DType> dtype);

/// What a caller hands in: an Array, or a DeviceArray; kept until the engine needs it no more.
class Operand {
 public:
  /// @throws UsageError  as view_of()
  Operand(nb::handle x, std::optional<DType> dtype);
  const ArrayView& view() const { return view_; }

 private:
  std::optional<Array> array_;  // its export is released when this goes
  nb::object device_array_;
  ArrayView view_;
};

nb::dlpack::dtype to_dlpack(DType dtype);

/// What keeps memory for Python.
nb::capsule owner_of(std::shared_ptr<std::byte> memory);

/// Converts Python's seconds to nanoseconds; at most a century.
int64_t to_ns(double seconds);

/// Sets Python's error to a thrown error of ringdl, of the class of the same name. Call it with the
/// GIL held; it rethrows all other exceptions.
void raise_in_python(const std::exception_ptr& thrown);

/// Runs Python's signal handlers (Ctrl-C); throws what they raise. Takes the GIL.
void check_signals();

/// A user-defined reduction, and what keeps its code alive.
struct CustomOperation {
  Operation operation;
  nb::object owner;
};

/// What a work in flight uses.
struct Held {
  std::optional<Operand> array;
  std::optional<Operand> output;
  nb::object operation;
};

/// A driver and what is in flight in its engine.
struct Communicator {
  std::shared_ptr<Driver> driver;
  std::shared_ptr<SegmentWindow> window;         // until the driver uses it
  std::unordered_map<uint64_t, Held> in_flight;  // by work; touched with the GIL held

  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() {
    if (!driver) return;
    let_go_of_ended();
    if (!driver->is_shut_down() && !in_flight.empty()) {  // MPI may still read what it sends
      new auto(std::move(in_flight));
    }
    const nb::gil_scoped_release release;
    driver.reset();
  }

  void let_go_of_ended() {
    std::vector<uint64_t> ended;
    {
      const nb::gil_scoped_release release;
      ended = driver->take_ended();
    }
    for (const uint64_t id : ended) in_flight.erase(id);
  }
};

/// In-place allreduce of a NumPy array over all ranks, which wait for it at once.
/// @param op  a reduction; invalid: the average
/// @returns True if it is done, a work if it is under way, None if it has to be submitted instead
nb::object allreduce_now(Communicator& self, nb::handle x, nb::handle op);

void bind_communicator(nb::module_& module);
void bind_quick_allreduce(nb::module_& module);
void bind_buckets(nb::module_& module);
void bind_cuda(nb::module_& module);
void bind_server(nb::module_& module);
void bind_simulation(nb::module_& module);
void bind_xla(nb::module_& module);

}  // namespace ringdl::binding

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <signal.h>

#include <array>
#include <string>

#include "base/error.h"
#include "base/late_call.h"
#include "binding/binding.h"
#include "collective/planner/algorithms.h"
#include "engine/driver.h"
#include "reduce/adasum.h"
#include "reduce/reduce.h"
#include "reduce/streaming.h"

namespace ringdl::binding {
namespace {

std::array<PyObject*, 5> error_classes;

PyObject* error_class(const char* name) {
  return nb::module_::import_("ringdl._errors").attr(name).inc_ref().ptr();
}

// The Python classes live in ringdl._errors; kept for as long as the interpreter lives.
void bind_errors() {
  error_classes = {error_class("Error"), error_class("MismatchError"), error_class("StallError"),
                   error_class("UsageError"), error_class("RankFailedError")};
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) { raise_in_python(thrown); });
}

void (*handler_before)(int) = nullptr;

void request_dumps_and_go_on(int signal) {
  request_dumps();
  if (handler_before != nullptr) handler_before(signal);
}

// A handler that was set before (MPICH sets one) is called as well.
void dump_on_signal(int signal) {
  struct sigaction before{};
  if (sigaction(signal, nullptr, &before) != 0 || (before.sa_flags & SA_SIGINFO) != 0) return;
  if (before.sa_handler == SIG_IGN || before.sa_handler == request_dumps_and_go_on) return;
  handler_before = before.sa_handler == SIG_DFL ? nullptr : before.sa_handler;
  struct sigaction action{};
  action.sa_handler = request_dumps_and_go_on;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

}  // namespace

void raise_in_python(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const MismatchError& error) {
    PyErr_SetString(error_classes[1], error.what());
  } catch (const StallError& error) {
    PyErr_SetString(error_classes[2], error.what());
  } catch (const UsageError& error) {
    PyErr_SetString(error_classes[3], error.what());
  } catch (const RankFailedError& error) {
    PyErr_SetString(error_classes[4], error.what());
  } catch (const Error& error) {
    PyErr_SetString(error_classes[0], error.what());
  }
}

NB_MODULE(_engine, module) {
  nb::set_leak_warnings(false);  // works in flight at exit are the job's end, not a leak
  bind_errors();

  nb::enum_<DType>(module, "DType")
      .value("float64", DType::kFloat64)
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("int64", DType::kInt64)
      .value("int32", DType::kInt32)
      .value("int16", DType::kInt16)
      .value("int8", DType::kInt8)
      .value("uint8", DType::kUInt8)
      .value("bool", DType::kBool);

  nb::enum_<Reduction>(module, "Reduction", "How elements of several ranks become one.")
      .value("Sum", Reduction::kSum)
      .value("Average", Reduction::kAverage)
      .value("Min", Reduction::kMin)
      .value("Max", Reduction::kMax)
      .value("Product", Reduction::kProduct)
      .value("BitAnd", Reduction::kBitAnd)
      .value("BitOr", Reduction::kBitOr)
      .value("BitXor", Reduction::kBitXor);

  nb::enum_<Kind>(module, "Kind")
      .value("allreduce", Kind::kAllreduce)
      .value("broadcast", Kind::kBroadcast)
      .value("allgather", Kind::kAllgather)
      .value("barrier", Kind::kBarrier)
      .value("reducescatter", Kind::kReduceScatter)
      .value("alltoall", Kind::kAlltoall)
      .value("gather", Kind::kGather)
      .value("scatter", Kind::kScatter)
      .value("message", Kind::kMessage);

  nb::enum_<Algorithm> algorithm(module, "Algorithm");
  for (const AllreduceAlgorithm* its : algorithms()) algorithm.value(its->name.data(), its->id);

  module.def("dump_on_signal", &dump_on_signal, nb::arg("signal"));
  nb::class_<LateCall>(module, "LateCall")
      .def(nb::init<std::string, double, std::string, double, bool>(), nb::arg("text"),
           nb::arg("late_after"), nb::arg("last_words"), nb::arg("end_after"),
           nb::arg("by_signal"));
  module.def(
      "stream_copy",
      [](const nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig>& into,
         const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig>& from) {
        if (into.size() != from.size()) throw UsageError("stream_copy: lengths differ");
        const nb::gil_scoped_release release;
        stream_copy(reinterpret_cast<std::byte*>(into.data()),
                    reinterpret_cast<const std::byte*>(from.data()), from.size());
        stream_fence();
      },
      nb::arg("into"), nb::arg("source"));
  module.def(
      "adasum_operation",
      [](DType dtype) {
        const CustomKernel kernel = find_adasum(dtype);
        if (kernel == nullptr) {
          throw UsageError("Adasum is for floating-point arrays, not for " +
                           std::string(name_of(dtype)));
        }
        return CustomOperation{{kernel, kAdasumDigest, "Adasum"}, nb::none()};
      },
      nb::arg("dtype"));
  module.def("simd_level", [] { return std::string(name_of(detect_simd_level())); });

  bind_communicator(module);
  bind_quick_allreduce(module);
  bind_buckets(module);
  bind_cuda(module);
  bind_server(module);
  bind_simulation(module);
  bind_xla(module);
}

}  // namespace ringdl::binding

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>

#include "binding/binding.h"
#include "transport/loopback/loopback.h"
#include "transport/mpi/mpi.h"

namespace ringdl::binding {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

std::shared_ptr<Work> submit(Communicator& self, Call call, const Array& array,
                             std::optional<DType> dtype) {
  ArrayView view = view_of(array, dtype);
  call.dtype = view.dtype;
  call.shape = std::move(view.shape);
  if (call.kind == Kind::kAllgather && call.shape.empty()) call.shape = {1};
  std::shared_ptr<Work> work;
  {
    const nb::gil_scoped_release release;
    work = self.engine->submit(call, view.data);
  }
  if (!work->released.load()) self.in_flight.emplace(work->id, array);
  self.let_go_of_ended();
  return work;
}

// What an allgather collected: the bytes of each rank's block, and all blocks.
std::tuple<std::vector<int64_t>, Bytes> take_gathered(Work& work) {
  auto* buffer = new Buffer(std::move(work.allgather->result()));
  const nb::capsule owner(buffer, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
  static uint8_t nothing;
  void* data = buffer->size() > 0 ? static_cast<void*>(buffer->data()) : &nothing;
  return {work.allgather->lengths(), Bytes(data, {buffer->size()}, owner)};
}

std::unique_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport,
                                                bool threads) {
  EngineOptions options;
  options.threads = threads;
  auto communicator = std::make_unique<Communicator>();
  communicator->engine = make_engine(std::move(transport), options);
  return communicator;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Work>(module, "Work")
      .def_prop_ro("ended", &Work::ended)
      .def_prop_ro("label", [](const Work& work) { return work.label; })
      .def("take_gathered", &take_gathered);

  nb::class_<Communicator>(module, "Communicator")
      .def_prop_ro("rank", [](const Communicator& self) { return self.engine->rank(); })
      .def_prop_ro("size", [](const Communicator& self) { return self.engine->size(); })
      .def_prop_ro("is_shut_down",
                   [](const Communicator& self) { return self.engine->is_shut_down(); })
      .def(
          "allreduce",
          [](Communicator& self, const Array& array, std::optional<DType> dtype,
             Reduction reduction, const std::string& name) {
            return submit(self, {Kind::kAllreduce, {}, reduction, -1, {}, name}, array, dtype);
          },
          nb::arg("array"), nb::arg("dtype").none(), nb::arg("reduction"), nb::arg("name"))
      .def(
          "broadcast",
          [](Communicator& self, const Array& array, std::optional<DType> dtype, int root,
             const std::string& name) {
            return submit(self, {Kind::kBroadcast, {}, Reduction::kSum, root, {}, name}, array,
                          dtype);
          },
          nb::arg("array"), nb::arg("dtype").none(), nb::arg("root"), nb::arg("name"))
      .def(
          "allgather",
          [](Communicator& self, const Array& array, std::optional<DType> dtype,
             const std::string& name) {
            return submit(self, {Kind::kAllgather, {}, Reduction::kSum, -1, {}, name}, array,
                          dtype);
          },
          nb::arg("array"), nb::arg("dtype").none(), nb::arg("name"))
      .def(
          "barrier",
          [](Communicator& self, const std::string& name) {
            const nb::gil_scoped_release release;
            return self.engine->submit({Kind::kBarrier, {}, Reduction::kSum, -1, {}, name},
                                       nullptr);
          },
          nb::arg("name"))
      .def("wake",
           [](Communicator& self) {
             const nb::gil_scoped_release release;
             self.engine->wake();
           })
      .def(
          "wait",
          [](Communicator& self, const std::shared_ptr<Work>& work, double timeout) {
            {
              const nb::gil_scoped_release release;
              self.engine->wait(work, to_ns(timeout), check_signals);
            }
            self.let_go_of_ended();
          },
          nb::arg("work"), nb::arg("timeout"))
      .def("shutdown",
           [](Communicator& self) {
             {
               const nb::gil_scoped_release release;
               self.engine->shutdown(check_signals);
             }
             self.in_flight.clear();
           })
      .def("set_segment_bytes",
           [](Communicator& self, size_t bytes) { self.engine->set_segment_bytes(bytes); })
      .def("set_may_spin",
           [](Communicator& self, bool may_spin) { self.engine->set_may_spin(may_spin); })
      .def("stats", [](const Communicator& self) { return self.engine->stats(); });

  module.def("alone", [] { return make_communicator(std::move(make_loopback(1)[0]), true); });
  module.def(
      "loopback",
      [](int size) {
        std::vector<std::unique_ptr<Communicator>> communicators;
        for (auto& transport : make_loopback(size)) {
          communicators.push_back(make_communicator(std::move(transport), true));
        }
        nb::list list;
        for (auto& communicator : communicators) list.append(nb::cast(std::move(communicator)));
        return list;
      },
      nb::arg("size"));
  module.def(
      "over_mpi",
      [](const std::string& module_path, bool open_mpi, uint64_t comm, uint64_t byte,
         uint64_t errors_return, int any_source, int max_tag, bool threads) {
        const nb::gil_scoped_release release;
        return make_communicator(make_mpi_transport({module_path, open_mpi, comm, byte,
                                                     errors_return, any_source, max_tag}),
                                 threads);
      },
      nb::arg("module_path"), nb::arg("open_mpi"), nb::arg("comm"), nb::arg("byte"),
      nb::arg("errors_return"), nb::arg("any_source"), nb::arg("max_tag"), nb::arg("threads"));
}

}  // namespace ringdl::binding

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "binding/binding.h"
#include "binding/costs.h"
#include "collective/planner/algorithms.h"
#include "cuda/executors.h"
#include "transport/loopback/loopback.h"
#include "transport/mpi/mpi.h"
#include "transport/shm/segment_window.h"
#include "transport/tcp/tcp.h"

namespace ringdl::binding {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// The trace that `take` returns, in the format of a trace file.
template <class Take>
nb::bytes json_of_trace(const Communicator& self, int64_t origin_ns, const Take& take) {
  std::string text;
  {
    const nb::gil_scoped_release release;
    text = json_of(take(), self.driver->rank(), origin_ns);
  }
  return nb::bytes(text.data(), text.size());
}

std::shared_ptr<Work> submit(Communicator& self, Kind kind, nb::handle array,
                             std::optional<DType> dtype, Reduction reduction, int root,
                             const std::string& name, SharedGroup group,
                             std::optional<Algorithm> algorithm, nb::handle operation,
                             std::vector<int64_t> splits, nb::handle output,
                             std::optional<DType> compression, bool from_any) {
  Call call;
  call.from_any = from_any;
  call.kind = kind;
  call.reduction = reduction;
  call.root = root;
  call.name = name;
  call.group = std::move(group);
  call.algorithm = algorithm;
  call.splits = std::move(splits);
  call.compression = compression;
  void* data = nullptr;
  Held held{.array = {}, .output = {}, .operation = nb::borrow(operation)};
  if (!array.is_none()) {
    const ArrayView& view = held.array.emplace(array, dtype).view();
    call.dtype = view.dtype;
    call.shape = view.shape;
    call.memory = view.memory;
    call.stream = view.stream;
    data = view.data;
  }
  if (!output.is_none()) call.output = held.output.emplace(output, dtype).view().data;
  if (!operation.is_none()) call.operation = nb::cast<CustomOperation&>(operation).operation;
  std::shared_ptr<Work> work;
  {
    const nb::gil_scoped_release release;
    work = self.driver->submit(call, data);
  }
  if (held.array && !work->released.load()) self.in_flight.emplace(work->id, std::move(held));
  self.let_go_of_ended();
  return work;
}

// What a collective has collected: the bytes from each rank, and all of them.
std::tuple<std::vector<int64_t>, Bytes> take_gathered(Work& work) {
  Gathered& gathered = *work.collective->gathered();
  auto* buffer = new Buffer(std::move(gathered.data));
  const nb::capsule owner(buffer, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
  static uint8_t nothing;
  void* data = buffer->size() > 0 ? static_cast<void*>(buffer->data()) : &nothing;
  return {gathered.lengths, Bytes(data, {buffer->size()}, owner)};
}

// Bytes in shared memory if there is any.
Bytes allocate_array(const Communicator& self, size_t bytes) {
  std::shared_ptr<std::byte> memory;
  {
    const nb::gil_scoped_release release;
    memory = self.driver->allocate(bytes);
  }
  std::byte* const data = memory.get();
  return Bytes(data, {bytes}, owner_of(std::move(memory)));
}

std::unique_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport,
                                                bool threads) {
  auto communicator = std::make_unique<Communicator>();
  EngineOptions options;
  options.devices = std::make_shared<cuda::Executors>();
  communicator->driver = make_driver(std::move(transport), options, threads);
  return communicator;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Work>(module, "Work")
      .def_prop_ro("ended", &Work::ended)
      .def_prop_ro("label", [](const Work& work) { return work.label(); })
      .def_prop_ro("sender", [](const Work& work) { return work.sender.load(); })
      .def("take_gathered", &take_gathered);

  nb::class_<Group>(module, "Group")
      .def_ro("id", &Group::id)
      .def_ro("rank", &Group::rank)
      .def_ro("ranks", &Group::ranks);

  nb::class_<CustomOperation>(module, "CustomOperation")
      .def(
          "__init__",
          [](CustomOperation* self, uintptr_t address, uint64_t digest, const std::string& name,
             nb::object owner) {
            using Kernel = decltype(Operation::kernel);
            new (self) CustomOperation{{reinterpret_cast<Kernel>(address), digest, name},
                                       std::move(owner)};
          },
          nb::arg("address"), nb::arg("digest"), nb::arg("name"), nb::arg("owner"));

  nb::class_<Communicator>(module, "Communicator")
      .def_prop_ro("rank", [](const Communicator& self) { return self.driver->rank(); })
      .def_prop_ro("size", [](const Communicator& self) { return self.driver->size(); })
      .def_prop_ro("has_threads",
                   [](const Communicator& self) { return self.driver->has_threads(); })
      .def_prop_ro("is_shut_down",
                   [](const Communicator& self) { return self.driver->is_shut_down(); })
      .def("submit", &submit, nb::arg("kind"), nb::arg("array").none(), nb::arg("dtype").none(),
           nb::arg("reduction") = Reduction::kSum, nb::arg("root") = -1, nb::arg("name") = "",
           nb::arg("group").none() = nb::none(), nb::arg("algorithm").none() = nb::none(),
           nb::arg("operation").none() = nb::none(), nb::arg("splits") = std::vector<int64_t>{},
           nb::arg("output").none() = nb::none(), nb::arg("compression").none() = nb::none(),
           nb::arg("from_any") = false)
      .def("allreduce_now", &allreduce_now, nb::arg("x").none(), nb::arg("op").none())
      .def(
          "refuse",
          [](Communicator& self, Kind kind, const std::string& name, SharedGroup group,
             const std::string& why) {
            Call call;
            call.kind = kind;
            call.name = name;
            call.group = std::move(group);
            const nb::gil_scoped_release release;
            self.driver->refuse(call, why);
          },
          nb::arg("kind"), nb::arg("name"), nb::arg("group").none(), nb::arg("why"))
      .def(
          "group",
          [](const Communicator& self, std::vector<int> ranks, uint64_t salt) {
            SharedGroup group =
                group_of(std::move(ranks), self.driver->rank(), self.driver->size(), salt);
            const nb::gil_scoped_release release;
            self.driver->know_group(group);
            return group;
          },
          nb::arg("ranks"), nb::arg("salt"))
      .def(
          "pair",
          [](const Communicator& self, int from, int to, const SharedGroup& group) {
            return group_of_pair(from, to, group ? *group : *self.driver->group_of_all_ranks());
          },
          nb::arg("from_rank"), nb::arg("to_rank"), nb::arg("group").none())
      .def("wake",
           [](Communicator& self) {
             const nb::gil_scoped_release release;
             self.driver->wake();
           })
      .def(
          "wait",
          [](Communicator& self, const std::shared_ptr<Work>& work, double timeout, bool for_good) {
            {
              const nb::gil_scoped_release release;
              self.driver->wait(work, to_ns(timeout), check_signals, for_good);
            }
            self.let_go_of_ended();
          },
          nb::arg("work"), nb::arg("timeout"), nb::arg("for_good"))
      .def(
          "wait_any",
          [](Communicator& self, const std::vector<std::shared_ptr<Work>>& works,
             const std::vector<double>& elapsed, const std::vector<double>& timeouts,
             uint64_t seen) -> std::optional<std::tuple<size_t, std::string>> {
            std::vector<Driver::Awaited> awaited;
            const int64_t now = now_ns();
            for (size_t i = 0; i < works.size(); ++i) {
              awaited.push_back({works[i], now - to_ns(elapsed[i]), to_ns(timeouts[i])});
            }
            std::optional<Driver::Stalled> stalled;
            {
              const nb::gil_scoped_release release;
              stalled = self.driver->wait_any(awaited, seen);
            }
            self.let_go_of_ended();
            if (!stalled) return std::nullopt;
            return std::make_tuple(stalled->index, stalled->why);
          },
          nb::arg("works"), nb::arg("elapsed"), nb::arg("timeouts"), nb::arg("seen"))
      .def_prop_ro("notifications",
                   [](const Communicator& self) { return self.driver->notifications(); })
      .def("notify", [](Communicator& self) { self.driver->notify(); })
      .def(
          "join",
          [](Communicator& self, double timeout) {
            const nb::gil_scoped_release release;
            return self.driver->join(to_ns(timeout), check_signals);
          },
          nb::arg("timeout"))
      .def(
          "set_join_answers_allreduces_only",
          [](Communicator& self, bool only) {
            const nb::gil_scoped_release release;
            self.driver->set_join_answers_allreduces_only(only);
          },
          nb::arg("only"))
      .def("poll",
           [](Communicator& self) {
             const nb::gil_scoped_release release;
             self.driver->poll();
           })
      .def("forget_submitters",
           [](Communicator& self) {
             const nb::gil_scoped_release release;
             self.driver->forget_submitters();
           })
      .def("shutdown",
           [](Communicator& self) {
             {
               const nb::gil_scoped_release release;
               self.driver->shutdown(check_signals);
             }
             self.in_flight.clear();
           })
      .def("abandon",
           [](Communicator& self) {
             const nb::gil_scoped_release release;
             self.driver->abandon();
           })
      .def("set_segment_bytes",
           [](Communicator& self, size_t bytes) {
             const nb::gil_scoped_release release;
             self.driver->set_segment_bytes(bytes);
           })
      .def(
          "open_window",
          [](Communicator& self, int local_ranks) {
            self.window =
                std::make_shared<SegmentWindow>(self.driver->rank(), self.driver->size(),
                                                SegmentWindow::default_bytes(local_ranks));
            const Segment::Address address = self.window->address();
            return std::make_tuple(address.process, address.descriptor, address.bytes,
                                   address.nonce);
          },
          nb::arg("local_ranks"))
      .def(
          "reach",
          [](Communicator& self, int rank,
             std::tuple<int64_t, int64_t, uint64_t, uint64_t> address) {
            const auto [process, descriptor, bytes, nonce] = address;
            return self.window->reach(rank, {process, descriptor, bytes, nonce});
          },
          nb::arg("rank"), nb::arg("address"))
      .def(
          "use_window",
          [](Communicator& self, std::vector<int> hosts) {
            const nb::gil_scoped_release release;
            self.driver->set_window(self.window, std::move(hosts));
          },
          nb::arg("hosts"))
      .def("close_window", [](Communicator& self) { self.window.reset(); })
      .def("use_no_device_peers", [](Communicator& self) { self.driver->devices().use_no_peers(); })
      .def("allocate", &allocate_array, nb::arg("byte_count"))
      .def(
          "allocate_on",
          [](const Communicator& self, int device, size_t bytes) {
            std::shared_ptr<std::byte> memory;
            {
              const nb::gil_scoped_release release;
              memory = self.driver->devices().allocate(device, bytes);
            }
            const auto address = reinterpret_cast<uintptr_t>(memory.get());
            return std::make_tuple(address, owner_of(std::move(memory)));
          },
          nb::arg("device"), nb::arg("byte_count"))
      .def(
          "set_choice",
          [](Communicator& self, const CostLines& costs, std::optional<Algorithm> wanted,
             std::optional<size_t> library_bytes) {
            const nb::gil_scoped_release release;
            self.driver->set_choice(model_of(costs), wanted, library_bytes.value_or(SIZE_MAX));
          },
          nb::arg("costs"), nb::arg("wanted").none(), nb::arg("library_bytes").none())
      .def("set_may_spin",
           [](Communicator& self, bool may_spin) {
             const nb::gil_scoped_release release;
             self.driver->set_may_spin(may_spin);
           })
      .def(
          "set_watchdog",
          [](Communicator& self, double after, bool dumps) {
            const nb::gil_scoped_release release;
            self.driver->set_watchdog(to_ns(after), dumps);
          },
          nb::arg("after"), nb::arg("dumps"))
      .def(
          "start_flight_recorder",
          [](Communicator& self, const std::string& path, const std::string& host,
             const std::string& version) {
            const nb::gil_scoped_release release;
            self.driver->start_flight_recorder(path, host, version);
          },
          nb::arg("path"), nb::arg("host"), nb::arg("version"))
      .def(
          "note_end",
          [](Communicator& self, const std::string& why) {
            const nb::gil_scoped_release release;
            self.driver->note_end(why);
          },
          nb::arg("why"))
      .def("start_trace",
           [](Communicator& self) {
             const nb::gil_scoped_release release;
             self.driver->start_trace();
           })
      .def(
          "take_trace",
          [](Communicator& self, int64_t origin_ns) {
            return json_of_trace(self, origin_ns, [&] { return self.driver->take_trace(); });
          },
          nb::arg("origin_ns"))
      .def(
          "stop_trace",
          [](Communicator& self, int64_t origin_ns) {
            return json_of_trace(self, origin_ns, [&] { return self.driver->stop_trace(); });
          },
          nb::arg("origin_ns"))
      .def("stats", [](const Communicator& self) {
        const nb::gil_scoped_release release;
        return self.driver->stats();
      });

  module.def(
      "read_flight_record",
      [](const nb::bytes& content) {
        return FlightRecorder::json_of({content.c_str(), content.size()});
      },
      nb::arg("content"));
  module.def("default_costs", [] { return lines_of(default_costs()); });
  module.def(
      "choose_allreduce",
      [](const CostLines& costs, size_t bytes, const std::vector<int>& hosts,
         size_t segment_bytes) {
        return choose_allreduce(model_of(costs), bytes, HostLayout::of(hosts, 0), segment_bytes);
      },
      nb::arg("costs"), nb::arg("byte_count"), nb::arg("hosts"), nb::arg("segment_bytes"));
  module.def(
      "ranks_of_allreduce",
      [](Algorithm algorithm) { return std::string(algorithm_of(algorithm).ranks); },
      nb::arg("algorithm"));
  module.def(
      "is_possible_allreduce",
      [](Algorithm algorithm, size_t bytes, const std::vector<int>& hosts, size_t segment_bytes) {
        return is_possible(algorithm, bytes, HostLayout::of(hosts, 0), segment_bytes);
      },
      nb::arg("algorithm"), nb::arg("byte_count"), nb::arg("hosts"), nb::arg("segment_bytes"));
  module.def(
      "effort_of_allreduce",
      [](Algorithm algorithm, size_t bytes, const std::vector<int>& hosts) {
        const Effort effort =
            algorithm_of(algorithm).effort(static_cast<double>(bytes), HostLayout::of(hosts, 0));
        return std::make_tuple(effort.steps, effort.bytes_moved);
      },
      nb::arg("algorithm"), nb::arg("byte_count"), nb::arg("hosts"));

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
  module.def("submit_for_caller", &Driver::submit_for_caller, nb::arg("does"));
  module.def(
      "over_sockets",
      [](int rank, std::vector<int> sockets) {
        const nb::gil_scoped_release release;
        return make_communicator(make_tcp_transport(rank, std::move(sockets)), true);
      },
      nb::arg("rank"), nb::arg("sockets"));
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

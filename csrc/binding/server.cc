#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "binding/binding.h"
#include "server/parameter_server.h"

namespace ringdl::binding {
namespace {

using Patience = ParameterServer::Patience;

// Arrays one after the other, of as many elements as there are parameters from `first` to `end`.
std::vector<Piece> pieces_of(const std::vector<Array>& arrays, DType dtype, size_t first,
                             size_t end) {
  std::vector<Piece> pieces;
  size_t begin = first;
  for (const Array& array : arrays) {
    const ArrayView view = view_of(array, std::nullopt);
    if (view.dtype != dtype) {
      throw UsageError("the parameters are " + std::string(name_of(dtype)) + ", and an array is " +
                       std::string(name_of(view.dtype)));
    }
    pieces.push_back({begin, array.size(), static_cast<std::byte*>(view.data)});
    begin += array.size();
  }
  if (begin != end) {
    throw UsageError("there are " + std::to_string(end - first) +
                     " parameters, and the arrays have " + std::to_string(begin - first) +
                     " elements");
  }
  return pieces;
}

// Releases the GIL for the destructor, too.
struct Server {
  const DType dtype;
  const size_t count;
  std::unique_ptr<ParameterServer> own;

  Server(DType its_dtype, size_t its_count, std::unique_ptr<ParameterServer> server)
      : dtype(its_dtype), count(its_count), own(std::move(server)) {}
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() {
    const nb::gil_scoped_release release;
    own.reset();
  }

  template <class Call>
  void with(const std::vector<Array>& arrays, std::optional<int> member, const Call& call) {
    const auto [begin, end] = member ? own->part(*member) : std::pair(size_t{0}, count);
    const std::vector<Piece> pieces = pieces_of(arrays, dtype, begin, end);
    const nb::gil_scoped_release release;
    call(*own, pieces);
  }
};

}  // namespace

void bind_server(nb::module_& module) {
  nb::enum_<Update::Rule>(module, "UpdateRule")
      .value("sgd", Update::Rule::kSgd)
      .value("adagrad", Update::Rule::kAdagrad)
      .value("adam", Update::Rule::kAdam);

  nb::class_<Update>(module, "Update")
      .def(
          "__init__",
          [](Update* self, Update::Rule rule, double rate, double beta1, double beta2,
             double epsilon) { new (self) Update{rule, rate, beta1, beta2, epsilon}; },
          nb::arg("rule"), nb::arg("rate"), nb::arg("beta1") = 0.9, nb::arg("beta2") = 0.999,
          nb::arg("epsilon") = 1e-8);

  auto server = nb::class_<Server>(module, "ParameterServer");
  server.attr("MULTIPLE") = ParameterServer::kMultiple;
  server
      .def(
          "__init__",
          [](Server* self, const Communicator& communicator, const std::string& name, DType dtype,
             size_t count, Update::Rule rule, int servers, const SharedGroup& group,
             bool ends_with_members) {
            const auto& driver = communicator.driver;
            const SharedGroup& members = group ? group : driver->group_of_all_ranks();
            std::unique_ptr<ParameterServer> own;
            {
              const nb::gil_scoped_release release;
              own = std::make_unique<ParameterServer>(driver, name, members, dtype, count, rule,
                                                      servers, ends_with_members);
            }
            new (self) Server(dtype, count, std::move(own));
          },
          nb::arg("communicator"), nb::arg("name"), nb::arg("dtype"), nb::arg("count"),
          nb::arg("rule"), nb::arg("servers"), nb::arg("group").none(),
          nb::arg("ends_with_members"))
      .def("place", [](const Server& self) { return self.own->place(); })
      .def("connect",
           [](Server& self, const std::vector<int64_t>& places) {
             const nb::gil_scoped_release release;
             self.own->connect(places);
           })
      .def("fill",
           [](Server& self, const std::vector<Array>& arrays, int member, double timeout) {
             self.with(arrays, {}, [&](ParameterServer& its, const auto& pieces) {
               its.fill(pieces, member, Patience{to_ns(timeout), check_signals});
             });
           })
      .def(
          "push",
          [](Server& self, const std::vector<Array>& arrays, const Update& how, double timeout,
             std::optional<int> member) {
            self.with(arrays, member, [&](ParameterServer& its, const auto& pieces) {
              its.push(pieces, how, Patience{to_ns(timeout), check_signals}, member);
            });
          },
          nb::arg("arrays"), nb::arg("how"), nb::arg("timeout"), nb::arg("member").none())
      .def(
          "fetch",
          [](Server& self, const std::vector<Array>& arrays, double timeout,
             std::optional<int> member) {
            self.with(arrays, member, [&](ParameterServer& its, const auto& pieces) {
              its.fetch(pieces, Patience{to_ns(timeout), check_signals}, member);
            });
          },
          nb::arg("arrays"), nb::arg("timeout"), nb::arg("member").none())
      .def(
          "pull",
          [](Server& self, const std::vector<Array>& arrays, double share, double timeout,
             std::optional<int> member) {
            self.with(arrays, member, [&](ParameterServer& its, const auto& pieces) {
              its.pull(pieces, share, Patience{to_ns(timeout), check_signals}, member);
            });
          },
          nb::arg("arrays"), nb::arg("share"), nb::arg("timeout"), nb::arg("member").none())
      .def(
          "set_clock",
          [](Server& self, std::optional<uint64_t> steps) {
            const nb::gil_scoped_release release;
            self.own->set_clock(steps.value_or(ParameterServer::kEnded));
          },
          nb::arg("steps").none())
      .def("flush_clock",
           [](Server& self, double timeout) {
             const nb::gil_scoped_release release;
             self.own->flush_clock(Patience{to_ns(timeout), check_signals});
           })
      .def("end_clock", [](Server& self, int member) { self.own->end_clock(member); })
      .def("clock", [](const Server& self, int member) { return self.own->clock(member); })
      .def("wait_for", [](Server& self, uint64_t steps, double timeout) {
        const nb::gil_scoped_release release;
        self.own->wait_for(steps, Patience{to_ns(timeout), check_signals});
      });
}

}  // namespace ringdl::binding

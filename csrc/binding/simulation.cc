#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <tuple>
#include <utility>

#include "binding/binding.h"
#include "binding/costs.h"
#include "collective/planner/choice.h"
#include "simulation/predict.h"

namespace ringdl::binding {

void bind_simulation(nb::module_& module) {
  nb::class_<ImaginedCluster>(module, "ImaginedCluster")
      .def(
          "__init__",
          [](ImaginedCluster* self, std::vector<int> hosts, std::pair<double, double> link,
             std::pair<double, double> memory, double message_seconds, size_t eager_bytes,
             double copy_rate, double reduce_rate, size_t segment_bytes, bool shares_memory) {
            new (self) ImaginedCluster{.hosts = std::move(hosts),
                                       .link = {link.first, to_ns(link.second)},
                                       .memory = {memory.first, to_ns(memory.second)},
                                       .message_ns = to_ns(message_seconds),
                                       .eager_bytes = eager_bytes,
                                       .processor = {copy_rate, reduce_rate},
                                       .segment_bytes = segment_bytes,
                                       .shares_memory = shares_memory};
          },
          nb::arg("hosts"), nb::kw_only(), nb::arg("link"), nb::arg("memory"),
          nb::arg("message_seconds"), nb::arg("eager_bytes"), nb::arg("copy_rate"),
          nb::arg("reduce_rate"), nb::arg("segment_bytes"), nb::arg("shares_memory"))
      .def_prop_ro("costs", [](const ImaginedCluster& self) { return lines_of(costs_of(self)); })
      .def(
          "modelled_seconds",
          [](const ImaginedCluster& self, Algorithm algorithm, size_t bytes) {
            std::vector<int> hosts = self.hosts;
            if (!self.shares_memory) std::iota(hosts.begin(), hosts.end(), 0);
            return predicted_seconds(costs_of(self), algorithm, bytes, HostLayout::of(hosts, 0));
          },
          nb::arg("algorithm"), nb::arg("byte_count"))
      .def(
          "predict_allreduces",
          [](const ImaginedCluster& self, const std::vector<std::pair<size_t, double>>& arrays,
             std::optional<Algorithm> wanted) {
            std::vector<ReadyArray> ready;
            for (const auto& [bytes, seconds] : arrays) ready.push_back({bytes, to_ns(seconds)});
            const nb::gil_scoped_release release;
            const Prediction its = predict_allreduces(self, ready, wanted, &check_signals);
            return std::make_tuple(its.seconds, its.busiest_seconds, its.most_link_bytes,
                                   its.messages, its.algorithms);
          },
          nb::arg("arrays"), nb::arg("algorithm").none());
}

}  // namespace ringdl::binding

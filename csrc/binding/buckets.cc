#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "binding/binding.h"
#include "bucket/plan.h"
#include "collective/device/library_allreduce.h"
#include "engine/gradient_buckets.h"

namespace ringdl::binding {
namespace {

using Spec = std::tuple<std::string, std::vector<int64_t>, DType, std::vector<int64_t>>;

std::vector<GradientSpec> gradients_of(const std::vector<Spec>& specs) {
  std::vector<GradientSpec> gradients;
  for (const auto& [name, shape, dtype, strides] : specs) {
    gradients.push_back({name, shape, dtype, strides});
  }
  return gradients;
}

// What buckets are made from, which takes it over.
struct Prepared {
  std::vector<GradientSpec> gradients;
  BucketPlan plan;
  SharedGroup group;
  std::unique_ptr<BucketMemory> own;
};

// Releases the GIL for the destructor, too.
struct Buckets {
  std::unique_ptr<GradientBuckets> own;

  explicit Buckets(std::unique_ptr<GradientBuckets> buckets) : own(std::move(buckets)) {}
  Buckets(const Buckets&) = delete;
  Buckets& operator=(const Buckets&) = delete;
  ~Buckets() {
    const nb::gil_scoped_release release;
    own.reset();
  }
};

// A gradient's memory, kept alive by the buckets: as NumPy's array (bfloat16 as uint16), or as a
// DLPack array.
template <class Framework>
nb::ndarray<Framework> view(nb::handle_t<Buckets> self, int index, bool as_bits) {
  GradientBuckets& buckets = *nb::cast<Buckets&>(self).own;
  if (index < 0 || index >= static_cast<int>(buckets.gradients().size())) {
    throw UsageError("there is no gradient " + std::to_string(index));
  }
  const GradientSpec& gradient = buckets.gradients()[static_cast<size_t>(index)];
  const std::vector<size_t> shape(gradient.shape.begin(), gradient.shape.end());
  nb::dlpack::dtype dtype = to_dlpack(gradient.dtype);
  if (as_bits && gradient.dtype == DType::kBFloat16) dtype = nb::dtype<uint16_t>();
  const Memory where = buckets.where();
  return nb::ndarray<Framework>(
      buckets.gradient(index), shape.size(), shape.data(), self,
      gradient.strides.empty() ? nullptr : gradient.strides.data(), dtype,
      where.is_on_device() ? nb::device::cuda::value : nb::device::cpu::value, where.device);
}

}  // namespace

void bind_buckets(nb::module_& module) {
  module.def(
      "plan_buckets",
      [](const std::vector<Spec>& specs, int64_t bucket_bytes, int64_t first_bucket_bytes) {
        std::vector<std::vector<int>> indices;
        const BucketPlan plan = plan_buckets(gradients_of(specs), bucket_bytes, first_bucket_bytes);
        for (const BucketLayout& bucket : plan.buckets) indices.push_back(bucket.gradients);
        return indices;
      },
      nb::arg("specs"), nb::arg("bucket_bytes"), nb::arg("first_bucket_bytes"));

  nb::enum_<BucketMemory::Way>(module, "BucketWay")
      .value("here", BucketMemory::Way::kHere)
      .value("direct", BucketMemory::Way::kDirect)
      .value("library", BucketMemory::Way::kByLibrary);
  module.def(
      "why_no_library",
      [](const std::vector<std::array<int64_t, 3>>& numbers) {
        std::vector<DeviceLibrary::Member> members;
        for (const auto& its : numbers) members.push_back({{its[0], its[1]}, its[2]});
        return why_no_library(members);
      },
      nb::arg("members"));
  nb::class_<Prepared>(module, "BucketMemory")
      .def(
          "__init__",
          [](Prepared* self, const Communicator& communicator, const std::vector<Spec>& specs,
             int64_t bucket_bytes, int64_t first_bucket_bytes, const SharedGroup& group,
             std::optional<int> device) {
            const auto& driver = communicator.driver;
            const SharedGroup& members = group ? group : driver->group_of_all_ranks();
            std::vector<GradientSpec> gradients = gradients_of(specs);
            BucketPlan plan = plan_buckets(gradients, bucket_bytes, first_bucket_bytes);
            const nb::gil_scoped_release release;
            const Memory where =
                device ? Memory{MemoryKind::kDevice, *device} : Memory{MemoryKind::kCpu, 0};
            auto own = std::make_unique<BucketMemory>(*driver, plan, members, where);
            new (self) Prepared{std::move(gradients), std::move(plan), members, std::move(own)};
          },
          nb::arg("communicator"), nb::arg("specs"), nb::arg("bucket_bytes"),
          nb::arg("first_bucket_bytes"), nb::arg("group").none(),
          nb::arg("device").none() = nb::none())
      .def("library_member",
           [](const Prepared& self) -> std::optional<std::array<int64_t, 3>> {
             const nb::gil_scoped_release release;
             const auto member = self.own->library_member();
             if (!member) return {};
             return std::array{member->device[0], member->device[1], member->state};
           })
      .def("place_on_device", [](const Prepared& self) { return self.own->place_on_device(); })
      .def("reach",
           [](Prepared& self, const BucketMemory::ByMember& places) {
             const nb::gil_scoped_release release;
             return self.own->reach(places);
           })
      .def("settle",
           [](Prepared& self, BucketMemory::Way way) {
             const nb::gil_scoped_release release;
             self.own->settle(way);
           })
      .def("way", [](const Prepared& self) { return self.own->way(); })
      .def("places", [](const Prepared& self) { return self.own->places(); });

  nb::class_<Buckets>(module, "GradientBuckets")
      .def(
          "__init__",
          [](Buckets* self, const Communicator& communicator, Prepared& memory,
             const BucketMemory::ByMember& places, Reduction reduction, int64_t first_number,
             std::optional<DType> compression) {
            std::unique_ptr<GradientBuckets> buckets;
            {
              const nb::gil_scoped_release release;
              buckets = std::make_unique<GradientBuckets>(
                  communicator.driver, std::move(memory.gradients), std::move(memory.plan),
                  std::move(memory.own), places, reduction, first_number, memory.group,
                  compression);
            }
            new (self) Buckets(std::move(buckets));
          },
          nb::arg("communicator"), nb::arg("memory"), nb::arg("places"), nb::arg("reduction"),
          nb::arg("first_number"), nb::arg("compression").none())
      .def("numpy_view",
           [](nb::handle_t<Buckets> self, int index) { return view<nb::numpy>(self, index, true); })
      .def("dlpack_view", [](nb::handle_t<Buckets> self,
                             int index) { return view<nb::array_api>(self, index, false); })
      .def("address",
           [](const Buckets& self, int index) {
             return reinterpret_cast<uintptr_t>(self.own->gradient(index));
           })
      .def("ready",
           [](Buckets& self, int index) {
             const nb::gil_scoped_release release;
             return self.own->ready(index);
           })
      .def(
          "ready_on_device",
          [](Buckets& self, int index, uintptr_t stream, const DeviceArray* source, double scale) {
            std::optional<GradientBuckets::Source> from;
            if (source != nullptr) {
              from = {static_cast<const std::byte*>(source->view.data), source->view.dtype, scale};
            }
            const nb::gil_scoped_release release;
            return self.own->ready(index, reinterpret_cast<void*>(stream), from);
          },
          nb::arg("index"), nb::arg("stream"), nb::arg("source").none(), nb::arg("scale"))
      .def("packs", [](const Buckets& self) { return self.own->packs(); })
      .def(
          "unpack",
          [](Buckets& self, const std::vector<std::pair<int, const DeviceArray*>>& into,
             double scale, uintptr_t stream) {
            std::vector<GradientBuckets::Target> targets;
            for (const auto& [index, array] : into) {
              const ArrayView& view = array->view;
              targets.push_back({index, static_cast<std::byte*>(view.data), view.dtype});
            }
            const nb::gil_scoped_release release;
            self.own->unpack(reinterpret_cast<void*>(stream), targets, scale);
          },
          nb::arg("into"), nb::arg("scale"), nb::arg("stream"))
      .def(
          "count_nonfinite", [](Buckets& self) { self.own->count_non_finite(); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("nonfinite", [](const Buckets& self) { return self.own->non_finite(); })
      .def(
          "wait",
          [](Buckets& self, double timeout, bool for_good, uintptr_t stream) {
            const nb::gil_scoped_release release;
            return self.own->wait(to_ns(timeout), check_signals, for_good,
                                  reinterpret_cast<void*>(stream));
          },
          nb::arg("timeout"), nb::arg("for_good"), nb::arg("stream") = 0);
}

}  // namespace ringdl::binding

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/binding.h"
#include "cuda/device.h"
#include "cuda/kernel_image.h"
#include "cuda/nccl.h"
#include "cuda/survey.h"

namespace ringdl::binding {

void bind_cuda(nb::module_& module) {
  nb::class_<DeviceArray>(module, "DeviceArray")
      .def(
          "__init__",
          [](DeviceArray* self, uintptr_t address, DType dtype, std::vector<int64_t> shape,
             int device, uintptr_t stream, nb::object owner) {
            new (self)
                DeviceArray{{reinterpret_cast<void*>(address), dtype, std::move(shape),
                             Memory{MemoryKind::kDevice, device}, reinterpret_cast<void*>(stream)},
                            std::move(owner)};
          },
          nb::arg("address"), nb::arg("dtype"), nb::arg("shape"), nb::arg("device"),
          nb::arg("stream"), nb::arg("owner"))
      .def_prop_ro("dtype", [](const DeviceArray& self) { return self.view.dtype; })
      .def_prop_ro("shape", [](const DeviceArray& self) { return self.view.shape; })
      .def_prop_ro(
          "address",
          [](const DeviceArray& self) { return reinterpret_cast<uintptr_t>(self.view.data); })
      .def_prop_ro("device", [](const DeviceArray& self) { return self.view.memory.device; })
      .def_prop_ro(
          "stream",
          [](const DeviceArray& self) { return reinterpret_cast<uintptr_t>(self.view.stream); })
      .def_ro("owner", &DeviceArray::owner);
  nb::class_<cuda::DeviceFacts>(module, "CudaDevice")
      .def_ro("name", &cuda::DeviceFacts::name)
      .def_ro("bus", &cuda::DeviceFacts::bus)
      .def_ro("byte_count", &cuda::DeviceFacts::bytes)
      .def_ro("capability", &cuda::DeviceFacts::capability)
      .def_ro("peers", &cuda::DeviceFacts::peers);
  module.def("cuda_driver", [] {
    const nb::gil_scoped_release release;
    const cuda::Driver& found = cuda::driver();
    return std::make_tuple(found.version, found.why_not);
  });
  module.def("cuda_devices", [] {
    const nb::gil_scoped_release release;
    const cuda::Driver& found = cuda::driver();
    return found.functions != nullptr ? cuda::survey(*found.functions)
                                      : std::vector<cuda::DeviceFacts>{};
  });
  module.def(
      "cuda_load_kernels",
      [](int device) {
        const nb::gil_scoped_release release;
        return cuda::Device::of(device).load_kernels();
      },
      nb::arg("device"));
  module.def(
      "cuda_use_kernels",
      [](int device, const nb::bytes& image) {
        cuda::Device::of(device).use_kernels({image.c_str(), image.size()});
      },
      nb::arg("device"), nb::arg("image"));
  module.def(
      "cuda_use_custom",
      [](int device, uintptr_t on_cpu, const nb::bytes& image, const std::string& name) {
        cuda::Device::of(device).use_custom(reinterpret_cast<CustomKernel>(on_cpu),
                                            {image.c_str(), image.size()}, name);
      },
      nb::arg("device"), nb::arg("on_cpu"), nb::arg("image"), nb::arg("name"));
  module.def("cuda_kernel_sources", [] {
    std::vector<std::pair<nb::str, nb::bytes>> sources;
    for (const auto& [name, text] : cuda::kernel_sources()) {
      sources.emplace_back(nb::str(name.data(), name.size()), nb::bytes(text.data(), text.size()));
    }
    return sources;
  });
  module.def(
      "cuda_allocate",
      [](int device, size_t bytes) {
        std::shared_ptr<std::byte> memory;
        {
          const nb::gil_scoped_release release;
          memory = cuda::Device::of(device).allocate(bytes);
        }
        const auto address = reinterpret_cast<uintptr_t>(memory.get());
        return std::make_tuple(address, owner_of(std::move(memory)));
      },
      nb::arg("device"), nb::arg("byte_count"));
  module.def(
      "cuda_copy",
      [](int device, uintptr_t into, uintptr_t from, size_t bytes, uintptr_t stream) {
        const nb::gil_scoped_release release;
        cuda::Device::of(device).copy(reinterpret_cast<void*>(into),
                                      reinterpret_cast<const void*>(from), bytes,
                                      reinterpret_cast<cuda::Stream>(stream));
      },
      nb::arg("device"), nb::arg("into"), nb::arg("from_address"), nb::arg("byte_count"),
      nb::arg("stream"));
  module.def(
      "cuda_device_of",
      [](uintptr_t address) {
        return cuda::Device::number_of(reinterpret_cast<const void*>(address));
      },
      nb::arg("address"));
  module.def(
      "look_for_nccl_at",
      [](std::vector<std::string> paths) { cuda::look_for_nccl_at(std::move(paths)); },
      nb::arg("paths"));
  module.def("nccl", [] {
    const nb::gil_scoped_release release;
    const cuda::Nccl& found = cuda::nccl();
    return std::make_tuple(found.version, found.why_not);
  });
  module.def("has_cuda_kernels", [] { return cuda::kernel_image() != nullptr; });
}

}  // namespace ringdl::binding

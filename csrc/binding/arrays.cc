#include <cmath>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "binding/binding.h"

namespace ringdl::binding {
namespace {

std::optional<DType> from_dlpack(nb::dlpack::dtype dtype) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (to_dlpack(static_cast<DType>(i)) == dtype) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace

nb::dlpack::dtype to_dlpack(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto bits = static_cast<uint8_t>(8 * item_bytes(dtype));
  const auto make = [bits](Code code) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), bits, 1};
  };
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kFloat16:
      return make(Code::Float);
    case DType::kBFloat16:
      return make(Code::Bfloat);
    case DType::kUInt8:
      return make(Code::UInt);
    case DType::kBool:
      return make(Code::Bool);
    default:
      return make(Code::Int);
  }
}

ArrayView view_of(const Array& array, std::optional<DType> dtype) {
  if (array.device_type() != nb::device::cpu::value) {
    throw UsageError(
        "the array is on a device, and its framework is not known; copy it to the CPU");
  }
  if (!dtype) dtype = from_dlpack(array.dtype());
  if (!dtype) {
    throw UsageError(
        "arrays of this dtype are not supported; use float64, float32, float16, bfloat16, "
        "int64, int32, int16, int8, uint8 or bool");
  }
  ArrayView view{static_cast<std::byte*>(array.data_handle()) + array.byte_offset(), *dtype, {}};
  int64_t expected = 1;
  bool empty = false;
  for (size_t i = array.ndim(); i-- > 0;) {
    const auto extent = static_cast<int64_t>(array.shape(i));
    if (extent == 0) empty = true;
    if (extent != 1 && array.stride(i) != expected && !empty) {
      bool zero = false;  // an empty array may have any strides
      for (size_t j = 0; j < array.ndim(); ++j) zero |= array.shape(j) == 0;
      if (!zero) throw UsageError("the array is not contiguous; pass a contiguous one");
    }
    expected *= extent;
  }
  if (array.data_handle() == nullptr && !empty) {
    throw UsageError("the array has no memory: it was freed, or is a stand-in for one");
  }
  for (size_t i = 0; i < array.ndim(); ++i) {
    view.shape.push_back(static_cast<int64_t>(array.shape(i)));
  }
  return view;
}

Operand::Operand(nb::handle x, std::optional<DType> dtype) {
  if (nb::isinstance<DeviceArray>(x)) {
    device_array_ = nb::borrow(x);
    view_ = nb::cast<const DeviceArray&>(x).view;
  } else {
    array_ = nb::cast<Array>(x);
    view_ = view_of(*array_, dtype);
  }
}

nb::capsule owner_of(std::shared_ptr<std::byte> memory) {
  return {new std::shared_ptr<std::byte>(std::move(memory)),
          [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte>*>(p); }};
}

int64_t to_ns(double seconds) {
  if (std::isnan(seconds) || seconds < 0) {
    throw UsageError("a timeout is a number of seconds, not less than 0");
  }
  return static_cast<int64_t>(std::min(seconds, 3.0e9) * static_cast<double>(kSecond));
}

void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace ringdl::binding

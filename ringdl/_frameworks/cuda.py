"""Arrays of CUDA devices that say where they lie by `__cuda_array_interface__`: Numba's, ringdl's.

In version 3 of that interface a stream is the one that the array may still be written in; None
says that there is nothing to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdl import _cuda, _engine
from ringdl._engine import DeviceArray, DType
from ringdl._errors import UsageError


def for_engine(x: Any, *, written: bool) -> tuple[Any, DType | None]:
    """See `ringdl._arrays.Framework.for_engine`."""
    its = x.__cuda_array_interface__
    if written and its["data"][1]:
        raise UsageError("the array is read-only; pass a writable one, or use the form that copies")
    if not _dtype_of(x).isnative:
        raise UsageError(f"the array has foreign byte order (dtype {its['typestr']}); convert it")
    strides = its.get("strides")
    if strides is not None and not _is_contiguous(its["shape"], strides, its["typestr"]):
        raise UsageError("the array on the device is not contiguous; pass a contiguous one")
    return x, None


def handed(array: Any) -> DeviceArray:
    """See `ringdl._arrays.Framework.handed`."""
    its = array.__cuda_array_interface__
    address, stream = its["data"][0], its.get("stream")
    return _cuda.described(
        address,
        dtype_name(array),
        its["shape"],
        _device_of(array),
        _cuda.DEFAULT_STREAM if stream is None else stream,
        array,
    )


def in_numpy(x: Any) -> None:
    """See `ringdl._arrays.Framework.in_numpy`."""


def write_back(array: Any, given: Any) -> None:
    """See `ringdl._arrays.Framework.write_back`: `for_engine` never copies."""


def copy_of(x: Any) -> _cuda.Array:
    """See `ringdl._arrays.Framework.copy_of`."""
    source = handed(for_engine(x, written=False)[0])
    copy = empty_like(x, x.__cuda_array_interface__["shape"])
    _engine.cuda_copy(copy.device, copy.address, source.address, copy.nbytes, _stream_of(x))
    return copy


def empty_like(like: Any, shape: Sequence[int]) -> _cuda.Array:
    """See `ringdl._arrays.Framework.empty_like`."""
    return _cuda.Array(shape, _dtype_of(like), _device_of(like))


def from_bytes(like: Any, shape: Sequence[int], data: np.ndarray[Any, Any]) -> _cuda.Array:
    """See `ringdl._arrays.Framework.from_bytes`."""
    array = empty_like(like, shape)
    return array.set(data.view(array.dtype).reshape(array.shape))


def concatenated(arrays: Sequence[Any]) -> _cuda.Array:
    """See `ringdl._arrays.Framework.concatenated`."""
    counts = [math.prod(array.__cuda_array_interface__["shape"]) for array in arrays]
    flat = empty_like(arrays[0], [sum(counts)])
    begin = flat.address
    for array, count in zip(arrays, counts, strict=True):
        byte_count = count * flat.dtype.itemsize
        source = array.__cuda_array_interface__["data"][0]
        _engine.cuda_copy(flat.device, begin, source, byte_count, _stream_of(array))
        begin += byte_count
    return flat


def distribute(flat: _cuda.Array, arrays: Sequence[Any]) -> None:
    """See `ringdl._arrays.Framework.distribute`."""
    begin = flat.address
    for array in arrays:
        its = array.__cuda_array_interface__
        byte_count = math.prod(its["shape"]) * flat.dtype.itemsize
        _engine.cuda_copy(flat.device, its["data"][0], begin, byte_count, _stream_of(array))
        begin += byte_count


def dtype_name(x: Any) -> str:
    """See `ringdl._arrays.Framework.dtype_name`."""
    return _dtype_of(x).name


def _device_of(x: Any) -> int:
    """By its memory; an array without elements has none, and may know its device."""
    address = x.__cuda_array_interface__["data"][0]
    known = getattr(x, "device", None)
    number = getattr(known, "id", known)
    return number if not address and isinstance(number, int) else _engine.cuda_device_of(address)


def _dtype_of(x: Any) -> np.dtype[Any]:
    """The array's own, as the interface has no word for bfloat16."""
    dtype = getattr(x, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) else np.dtype(x.__cuda_array_interface__["typestr"])


def _stream_of(x: Any) -> int:
    stream = x.__cuda_array_interface__.get("stream")
    return _cuda.DEFAULT_STREAM if stream is None else int(stream)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], typestr: str) -> bool:
    expected = np.dtype(typestr).itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return 0 in shape
        expected *= extent
    return True

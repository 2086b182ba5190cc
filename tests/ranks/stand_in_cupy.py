"""As much of CuPy as ringdl uses, over the pretended device: for machines where it cannot run."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from ringdl import _cuda


class _Device(nullcontext[None]):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.id = number


class ndarray(_cuda.Array):  # noqa: N801
    """By the name that ringdl knows it by."""

    __module__ = "cupy"

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        device: int,
        memory: tuple[int, object] | None = None,
        strides: Sequence[int] = (),
    ) -> None:
        super().__init__(shape, dtype, device, memory, strides)
        self._steps = strides

    @property
    def device(self) -> Any:
        return _Device(self._number)

    @device.setter
    def device(self, number: int) -> None:
        self._number = number

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def flags(self) -> Any:
        return types.SimpleNamespace(c_contiguous=not self._steps)

    @property
    def T(self) -> ndarray:  # noqa: N802
        assert self.ndim == 2
        return ndarray(self.shape[::-1], self.dtype, self._number, self._whole, (1, self.shape[1]))

    def numpy(self) -> np.ndarray[Any, Any]:
        return self._own().numpy()

    def set(self, values: Any) -> ndarray:
        self._own().set(values)
        return self

    @property
    def _whole(self) -> tuple[int, object]:
        return self.address, self

    def _own(self) -> _cuda.Array:
        return _cuda.Array(self.shape, self.dtype, self._number, self._whole, self._steps)

    def copy(self, order: str) -> ndarray:
        assert order == "C"
        return empty(self.shape, self.dtype).set(self.numpy())

    def ravel(self) -> ndarray:
        return self.reshape((self.size,))

    def reshape(self, shape: Sequence[int]) -> ndarray:
        return ndarray(shape, self.dtype, self._number, self._whole)

    def __getitem__(self, part: slice) -> ndarray:
        begin, end, _ = part.indices(self.size)
        address = self.address + begin * self.dtype.itemsize
        return ndarray((end - begin,), self.dtype, self._number, (address, self))

    def __setitem__(self, everything: Any, values: ndarray) -> None:
        assert everything is ...
        self.set(values.numpy())

    get = numpy

    def _joined(self, other: Any, join: Any) -> ndarray:
        return array(join(self.numpy(), other.numpy() if isinstance(other, ndarray) else other))

    def _changed(self, other: Any, join: Any) -> ndarray:
        return self.set(self._joined(other, join).numpy())

    def __add__(self, other: Any) -> ndarray:
        return self._joined(other, operator.add)

    def __mul__(self, other: Any) -> ndarray:
        return self._joined(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> ndarray:
        return self._joined(other, operator.truediv)

    def __pow__(self, other: float) -> ndarray:
        return self._joined(other, operator.pow)

    def __iadd__(self, other: Any) -> ndarray:
        return self._changed(other, operator.add)

    def __isub__(self, other: Any) -> ndarray:
        return self._changed(other, operator.sub)

    def __imul__(self, other: Any) -> ndarray:
        return self._changed(other, operator.mul)


def empty(shape: Sequence[int], dtype: Any) -> ndarray:
    return ndarray(shape, np.dtype(dtype), 0)


def array(values: Any) -> ndarray:
    values = np.asarray(values)
    return empty(values.shape, values.dtype).set(values)


def asarray(of: _cuda.Array) -> ndarray:
    return ndarray(of.shape, of.dtype, of.device, (of.address, of))


def from_dlpack(memory: Any) -> ndarray:
    tensor = _tensor(memory)
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    dtype = np.dtype(f"f{tensor.bits // 8}")
    device = memory.__dlpack_device__()[1]
    return ndarray(shape, dtype, device, (tensor.data or 0, memory))


def address_of(memory: Any) -> int:
    """Of the first element of what speaks DLPack."""
    address = _tensor(memory).data
    assert address is not None
    return int(address)


def _tensor(memory: Any) -> _Tensor:
    assert memory.__dlpack_device__()[0] == 2, "CUDA"
    capsule = memory.__dlpack__()
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found = _Tensor.from_address(pointer(capsule, name(capsule)))  # type: ignore[arg-type]
    found.capsule = capsule
    return found


class _Tensor(ctypes.Structure):
    """DLTensor, of floating-point elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )
    capsule: object  # which keeps it


def concatenate(arrays: Sequence[ndarray]) -> ndarray:
    return array(np.concatenate([each.numpy() for each in arrays]))


def install() -> Any:
    """Make it what ``import cupy`` finds."""
    module = sys.modules[__name__]
    stream = types.SimpleNamespace(ptr=0, synchronize=lambda: None)
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=_Device, get_current_stream=lambda: stream
    )
    sys.modules["cupy"] = module
    return module

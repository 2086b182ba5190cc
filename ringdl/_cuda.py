"""Arrays in the memory of CUDA devices: as the engine takes them, and some of ringdl's own."""

from __future__ import annotations

import math
import operator
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdl import _engine, _nccl
from ringdl._engine import DeviceArray, DType
from ringdl._errors import Error, UsageError

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

DEFAULT_STREAM = 1
"""The legacy default stream: other streams wait for it, and it waits for them."""


_why_not: dict[int, str] = {}
"""By device, what `load_kernels` has found."""


def warn(text: str) -> None:
    """Say what is slower than it could be."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def number_of(device: Any, communicator: Communicator) -> int:
    """The number of a device in this process: of 1, ``"cuda:1"``, ``torch.device("cuda", 1)``.

    Without a number it is `Communicator.local_device`.

    Raises:
        UsageError: that is none of a CUDA device, or this process has none.
    """
    name = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    number: int | None = None
    try:
        if name is None:
            number = operator.index(device)
        elif name[1]:
            number = int(name[1])
    except TypeError:
        raise UsageError(
            f'device is {device!r}; pass the number of a CUDA device, "cuda:1", or "cuda"'
        ) from None
    version, why_not = _engine.cuda_driver()
    if version == 0:
        raise UsageError(f"device is {device!r}, but {why_not}")
    if number is None:
        number = communicator.local_device
    if number is None:
        raise UsageError(f"device is {device!r}, but this process has no CUDA device")
    return number


@cache
def device_of_rank(local_rank: int, local_size: int) -> int | None:
    """The number of the device that a rank is to use: the ranks of a host take them by turns."""
    count = len(_engine.cuda_devices())
    if count == 0:
        return None
    is_own = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # maybe each rank sees its own
    if count < local_size and local_rank == 0 and not is_own:
        warn(f"{local_size} ranks of this host share {count} CUDA device{'s' * (count > 1)}")
    return local_rank % count


def described(
    address: int, dtype: str, shape: Sequence[int], device: int, stream: int, owner: object
) -> DeviceArray:
    """A contiguous array as the engine takes it.

    Args:
        address: of its first element.
        dtype: the name of its elements' type.
        shape: its extents.
        device: the number of its device in this process.
        stream: the handle of the stream in which it was made.
        owner: what keeps the memory.

    Raises:
        UsageError: no such dtype, or this process has no CUDA driver.
    """
    if dtype not in DType.__members__:
        raise UsageError(
            f"arrays of dtype {dtype} are not supported; use one of {', '.join(DType.__members__)}"
        )
    version, why_not = _engine.cuda_driver()
    if version == 0:
        raise UsageError(f"the array is on a CUDA device, and {why_not}; copy it to the CPU")
    if device not in _why_not and load_kernels(device):
        warn(f"arrays on CUDA device {device} go by way of the CPU's memory: {_why_not[device]}")
    return DeviceArray(address, DType[dtype], list(shape), device, stream, owner)


def load_kernels(device: int) -> str:
    """Make a device ready to reduce: with the kernels of this build, or compiled here and now.

    Returns:
        Why it cannot reduce; empty if it can.
    """
    if device not in _why_not:
        _why_not[device] = _load_kernels(device)
        _nccl.look()
    return _why_not[device]


def _load_kernels(device: int) -> str:
    why_not = _engine.cuda_load_kernels(device)
    if not why_not:
        return ""
    from ringdl import _nvrtc

    version, _ = _engine.cuda_driver()
    capability = _engine.cuda_devices()[device].capability
    try:
        _engine.cuda_use_kernels(device, _nvrtc.kernels(capability, version))
    except (Error, OSError) as error:
        return f"{why_not}; {error}"
    return ""


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The same type in NumPy's words."""
    if dtype == DType.bfloat16:
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype.name)


def copied_to_host(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Its elements, flat, after what is in its stream."""
    flat = np.empty(math.prod(array.shape), numpy_dtype(array.dtype))
    _engine.cuda_copy(array.device, flat.ctypes.data, array.address, flat.nbytes, array.stream)
    return flat


def copy_from_host(flat: np.ndarray[Any, Any], array: DeviceArray) -> None:
    """The way back, in the same stream."""
    _engine.cuda_copy(array.device, array.address, flat.ctypes.data, flat.nbytes, array.stream)


class Array:
    """A dense array in a device's memory: new, of any content, or over memory that is there.

    CuPy, Numba, PyTorch and others take it without a copy: `__cuda_array_interface__`. Results of
    collectives are complete when it is returned.

    Attributes:
        shape: its extents.
        dtype: of its elements.
        device: the number of its device in this process.
        address: of its first element.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        device: int,
        memory: tuple[int, object] | None = None,
        strides: Sequence[int] = (),
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.address, self._memory = memory or _engine.cuda_allocate(device, self.nbytes)
        self._strides = tuple(stride * dtype.itemsize for stride in strides) or None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": self._strides,
            "stream": None,
        }

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in the CPU's memory."""
        flat = np.empty(math.prod(self.shape), self.dtype)
        _engine.cuda_copy(self.device, flat.ctypes.data, self.address, self.nbytes, DEFAULT_STREAM)
        return np.array(self._arranged(flat), order="C")

    def set(self, values: Any) -> Array:
        """Copy values of the same shape into it; returns it."""
        flat = np.empty(math.prod(self.shape), self.dtype)
        self._arranged(flat)[...] = values
        _engine.cuda_copy(self.device, self.address, flat.ctypes.data, self.nbytes, DEFAULT_STREAM)
        return self

    def _arranged(self, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The same memory in this array's shape and strides."""
        if self._strides is None:
            return flat.reshape(self.shape)
        return np.lib.stride_tricks.as_strided(flat, self.shape, self._strides)

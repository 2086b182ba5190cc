"""Gradients of training loops that are written with CuPy.

Collectives take and return CuPy arrays as they are (`ringdl.allreduce_(x)`), in CuPy's current
stream; this is for gradients that are to travel while others are computed::

    buckets = ringdl.cupy.Buckets({"w": w, "b": b})     # gradients like these parameters
    dw, db = buckets.views()
    for x, y in batches:
        cupy.matmul(x.T, error, out=dw)
        buckets.ready(0)                                # travels from now on
        cupy.sum(error, axis=0, out=db)
        buckets.ready(1)
        buckets.wait()                                  # dw and db are averages now
        w -= rate * dw

An optimizer of one's own, or one of these, averages what it is given::

    optimizer = ringdl.cupy.DistributedOptimizer(ringdl.cupy.SGD(0.1, momentum=0.9))
    optimizer.step([w, b], gradients(w, b, x, y))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

import ringdl
from ringdl import _arrays
from ringdl._training.descent import SGD, Adam, AdamW
from ringdl._training.plain import DistributedOptimizer as _DistributedOptimizer
from ringdl._training.plain import PlainStore
from ringdl._training.replicas import Bytes, Replica
from ringdl._training.store import Spec

__all__ = ["SGD", "Adam", "AdamW", "Buckets", "DistributedOptimizer"]


class Buckets(ringdl.Buckets):
    """`ringdl.Buckets` on a CUDA device, as CuPy arrays.

    Args:
        parameters: by name, the arrays that gradients are to be like: C-contiguous, on one device,
            the same names, shapes, dtypes and order on all ranks.
        options: as those of `ringdl.Buckets`.

    Raises:
        UsageError: parameters lie on several devices, or there are none.
    """

    def __init__(self, parameters: Mapping[str, cupy.ndarray], **options: Any) -> None:
        devices = {array.device.id for array in parameters.values()}
        if len(devices) != 1:
            raise ringdl.UsageError(
                f"the parameters lie on the devices {sorted(devices)}; make buckets for each device"
            )
        specs = [(name, array.shape, array.dtype) for name, array in parameters.items()]
        super().__init__(specs, device=devices.pop(), **options)

    def view(self, index: int) -> cupy.ndarray:
        """The gradient of parameter `index`: always the same memory, zero at first."""
        return cupy.asarray(super().view(index))

    def ready(
        self,
        index: int,
        stream: int | None = None,
        source: Any = None,
        scale: float = 1.0,
    ) -> bool:
        """See `ringdl.Buckets.ready`; the stream is CuPy's current one, the source CuPy's array."""
        if isinstance(source, cupy.ndarray):
            source = _handed(source)
        return super().ready(index, self._stream() if stream is None else stream, source, scale)

    def wait(self, timeout: float | None = None, stream: int | None = None) -> list[bool]:
        """See `ringdl.Buckets.wait`; the stream is CuPy's current one."""
        return super().wait(timeout, self._stream() if stream is None else stream)

    def unpack(
        self, into: Mapping[int, Any], scale: float = 1.0, stream: int | None = None
    ) -> None:
        """See `ringdl.Buckets.unpack`; the stream is CuPy's current one, the arrays are CuPy's."""
        arrays = {index: _handed(array) for index, array in into.items()}
        super().unpack(arrays, scale, self._stream() if stream is None else stream)

    def _stream(self) -> int:
        return _stream_of(self.device)


class _Replica:
    def __init__(self, array: cupy.ndarray) -> None:
        self._array = array
        self.nbytes = int(array.nbytes)

    def read(self) -> Bytes:
        return np.ascontiguousarray(self._array.get()).reshape(-1).view(np.uint8)

    def write(self, elements: Bytes) -> None:
        self._array.set(elements.view(self._array.dtype).reshape(self._array.shape))


class _Store(PlainStore[cupy.ndarray]):
    _devices: tuple[int, ...] = ()

    def spec(self, name: str, parameter: cupy.ndarray) -> Spec:
        if not isinstance(parameter, cupy.ndarray) or parameter.dtype.kind != "f":
            what = getattr(parameter, "dtype", type(parameter).__name__)
            raise ringdl.UsageError(
                f"{name!r} is {what}; parameters are arrays of CuPy, of float64, float32 or float16"
            )
        self._devices = (*self._devices, int(parameter.device.id))
        return name, parameter.shape, parameter.dtype.name, ()

    def device(self, index: int) -> int:
        return self._devices[index]

    def stream(self, device: int) -> int:
        return _stream_of(device)

    def view(self, index: int, memory: Any) -> cupy.ndarray:
        return cupy.from_dlpack(memory)

    def source(self, gradient: cupy.ndarray, view: cupy.ndarray) -> Any:
        is_alike = gradient.dtype == view.dtype and gradient.flags.c_contiguous
        return _handed(gradient) if is_alike else None

    def replica(self, parameter: cupy.ndarray) -> Replica:
        return _Replica(parameter)

    def read(self, array: cupy.ndarray) -> Any:
        return array.get()

    def write(self, array: cupy.ndarray, values: Any) -> None:
        array.set(values)


class DistributedOptimizer(_DistributedOptimizer[cupy.ndarray]):
    """The one of `ringdl`, for arrays of CuPy."""

    __doc__ = _DistributedOptimizer.__doc__
    _store = _Store


def _stream_of(device: int | None) -> int:
    with cupy.cuda.Device(device):
        return int(cupy.cuda.get_current_stream().ptr)


def _handed(array: cupy.ndarray) -> ringdl._engine.DeviceArray:
    if not array.flags.c_contiguous:
        raise ringdl.UsageError("the array is not C-contiguous; pass one that is")
    handed: ringdl._engine.DeviceArray = _arrays.operand(array, written=False).handed
    return handed

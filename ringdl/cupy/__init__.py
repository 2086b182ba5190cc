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
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy

import ringdl
from ringdl import _arrays

__all__ = ["Buckets"]


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
        with cupy.cuda.Device(self.device):
            return int(cupy.cuda.get_current_stream().ptr)


def _handed(array: cupy.ndarray) -> ringdl._engine.DeviceArray:
    if not array.flags.c_contiguous:
        raise ringdl.UsageError("the array is not C-contiguous; pass one that is")
    handed: ringdl._engine.DeviceArray = _arrays.operand(array, written=False).handed
    return handed

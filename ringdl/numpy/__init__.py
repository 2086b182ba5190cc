"""Training loops that are written with NumPy: averaged gradients, and optimizers.

import ringdl, ringdl.numpy

ringdl.init()
optimizer = ringdl.numpy.DistributedOptimizer(ringdl.numpy.SGD(0.1, momentum=0.9))
for x, y in batches:                                # this rank's
    optimizer.step([w, b], gradients(w, b, x, y))   # w and b are the same on all ranks
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ringdl
from ringdl._training.plain import SGD, Adam, AdamW, PlainStore
from ringdl._training.plain import DistributedOptimizer as _DistributedOptimizer
from ringdl._training.replicas import Bytes, Replica
from ringdl._training.store import Spec

__all__ = ["SGD", "Adam", "AdamW", "DistributedOptimizer"]

_Array = np.ndarray[Any, Any]


class _Replica:
    def __init__(self, array: _Array) -> None:
        self._array = array
        self.nbytes = array.nbytes

    def read(self) -> Bytes:
        return np.ascontiguousarray(self._array).reshape(-1).view(np.uint8)

    def write(self, elements: Bytes) -> None:
        self._array[...] = elements.view(self._array.dtype).reshape(self._array.shape)


class _Store(PlainStore[_Array]):
    def spec(self, name: str, parameter: _Array) -> Spec:
        if not isinstance(parameter, np.ndarray):
            raise ringdl.UsageError(
                f"{name!r} is a {type(parameter).__name__}; parameters are arrays of NumPy, which "
                "the optimizer changes in place"
            )
        dtype = parameter.dtype.name
        if dtype not in ("float64", "float32", "float16"):
            raise ringdl.UsageError(
                f"{name!r} has dtype {dtype}; gradients of NumPy are float64, float32 or float16"
            )
        return name, parameter.shape, dtype, ()

    def view(self, index: int, memory: Any) -> _Array:
        return np.from_dlpack(memory)

    def replica(self, parameter: _Array) -> Replica:
        return _Replica(parameter)


class DistributedOptimizer(_DistributedOptimizer[_Array]):
    """The one of `ringdl`, for arrays of NumPy."""

    __doc__ = _DistributedOptimizer.__doc__
    _store = _Store

"""Arrays of NumPy as gradients and as replicas."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

import ringdl
from ringdl._training.replicas import Bytes
from ringdl._training.store import Spec

Array: TypeAlias = np.ndarray[Any, Any]


def spec_of(name: str, parameter: Any) -> Spec:
    """What the gradient of a parameter is like.

    Raises:
        UsageError: it is no array of NumPy, or none that has gradients.
    """
    if not isinstance(parameter, np.ndarray):
        raise ringdl.UsageError(
            f"{name!r} is a {type(parameter).__name__}; parameters are arrays of NumPy, which the "
            "optimizer changes in place"
        )
    dtype = parameter.dtype.name
    if dtype not in ("float64", "float32", "float16"):
        raise ringdl.UsageError(
            f"{name!r} has dtype {dtype}; gradients of NumPy are float64, float32 or float16"
        )
    return name, parameter.shape, dtype, ()


class ArrayReplica:
    """A `Replica` of an array."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.nbytes = array.nbytes

    def read(self) -> Bytes:
        """See `Replica`."""
        return np.ascontiguousarray(self._array).reshape(-1).view(np.uint8)

    def write(self, elements: Bytes) -> None:
        """See `Replica`."""
        self._array[...] = elements.view(self._array.dtype).reshape(self._array.shape)

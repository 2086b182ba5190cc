"""CuPy's arrays. They are handed over as others of CUDA devices, in CuPy's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ringdl._engine import DType
from ringdl._frameworks.cuda import dtype_name, handed, in_numpy

__all__ = [
    "concatenated",
    "copy_of",
    "distribute",
    "dtype_name",
    "empty_like",
    "for_engine",
    "from_bytes",
    "handed",
    "in_numpy",
    "write_back",
]


def for_engine(x: Any, *, written: bool) -> tuple[Any, DType | None]:
    """See `ringdl._arrays.Framework.for_engine`."""
    del written
    return (x if x.flags.c_contiguous else copy_of(x)), None


def write_back(array: Any, given: Any) -> None:
    """See `ringdl._arrays.Framework.write_back`."""
    with given.device:
        given[...] = array
        _wait()


def copy_of(x: Any) -> Any:
    """See `ringdl._arrays.Framework.copy_of`."""
    with x.device:
        return x.copy(order="C")


def empty_like(like: Any, shape: Sequence[int]) -> Any:
    """See `ringdl._arrays.Framework.empty_like`."""
    with like.device:
        return cupy.empty(tuple(shape), like.dtype)


def from_bytes(like: Any, shape: Sequence[int], data: np.ndarray[Any, Any]) -> Any:
    """See `ringdl._arrays.Framework.from_bytes`."""
    array = empty_like(like, shape)
    array.set(data.view(array.dtype).reshape(array.shape))
    return array


def concatenated(arrays: Sequence[Any]) -> Any:
    """See `ringdl._arrays.Framework.concatenated`."""
    with arrays[0].device:
        return cupy.concatenate([array.ravel() for array in arrays])


def distribute(flat: Any, arrays: Sequence[Any]) -> None:
    """See `ringdl._arrays.Framework.distribute`."""
    begin = 0
    with flat.device:
        for array in arrays:
            array[...] = flat[begin : begin + array.size].reshape(array.shape)
            begin += array.size
        _wait()


def _wait() -> None:
    """Until what was written is there: who uses it next may do so in any stream."""
    cupy.cuda.get_current_stream().synchronize()

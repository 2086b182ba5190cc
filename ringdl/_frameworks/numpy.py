"""NumPy's arrays, bfloat16 of ml_dtypes among them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdl._engine import DType
from ringdl._errors import UsageError

AnyNDArray = np.ndarray[Any, np.dtype[Any]]

_OWN = frozenset(np.dtype(name) for name in DType.__members__ if name != "bfloat16")
"""The dtypes that both ringdl and NumPy have, in native byte order."""


def for_engine(x: AnyNDArray, *, written: bool) -> tuple[AnyNDArray, DType | None]:
    """See `ringdl._arrays.Framework.for_engine`."""
    if written and not x.flags.writeable:
        raise UsageError("the array is read-only; pass a writable one, or use the form that copies")
    contiguous = x if x.flags.c_contiguous else copy_of(x)
    if type(contiguous) is not np.ndarray:  # a matrix, or mapped: its elements alone count
        contiguous = np.asarray(contiguous)
    if x.dtype in _OWN:  # not by its name, which takes NumPy longer than all else here
        return contiguous, None
    if _is_bfloat16(x.dtype):
        return contiguous.view("uint16"), DType.bfloat16
    if not x.dtype.isnative:
        raise UsageError(
            f"the array has foreign byte order (dtype {x.dtype.str}); convert it with "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    raise UsageError(
        f"arrays of dtype {x.dtype} are not supported; use one of {', '.join(DType.__members__)}"
    )


def handed(array: AnyNDArray) -> AnyNDArray:
    """See `ringdl._arrays.Framework.handed`."""
    return array


def in_numpy(x: AnyNDArray) -> AnyNDArray:
    """See `ringdl._arrays.Framework.in_numpy`."""
    return x


def write_back(array: AnyNDArray, given: AnyNDArray) -> None:
    """See `ringdl._arrays.Framework.write_back`."""
    if array.__array_interface__["data"][0] != given.__array_interface__["data"][0]:
        given.view(array.dtype)[...] = array


def copy_of(x: AnyNDArray) -> AnyNDArray:
    """See `ringdl._arrays.Framework.copy_of`."""
    return np.array(x, order="C")


def empty_like(like: AnyNDArray, shape: Sequence[int]) -> AnyNDArray:
    """See `ringdl._arrays.Framework.empty_like`."""
    return np.empty(shape, dtype=like.dtype)


def from_bytes(like: AnyNDArray, shape: Sequence[int], data: AnyNDArray) -> AnyNDArray:
    """See `ringdl._arrays.Framework.from_bytes`."""
    return data.view(like.dtype).reshape(shape)


def concatenated(arrays: Sequence[AnyNDArray]) -> AnyNDArray:
    """See `ringdl._arrays.Framework.concatenated`."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def distribute(flat: AnyNDArray, arrays: Sequence[AnyNDArray]) -> None:
    """See `ringdl._arrays.Framework.distribute`."""
    begin = 0
    for array in arrays:
        array[...] = flat[begin : begin + array.size].reshape(array.shape)
        begin += array.size


def dtype_name(x: AnyNDArray) -> str:
    """See `ringdl._arrays.Framework.dtype_name`."""
    return str(x.dtype)


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    ml_dtypes = sys.modules.get("ml_dtypes")  # not loaded: there can be no such array
    return ml_dtypes is not None and bool(dtype == ml_dtypes.bfloat16)

"""TensorFlow's tensors, which do not change: collectives return new ones, in the CPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringdl._arrays import Own
from ringdl._engine import DType
from ringdl._errors import UsageError
from ringdl._frameworks import numpy as of_numpy

_ALIGNMENT = 64
"""Kernels of TensorFlow take memory at multiples of this many bytes alone."""

AnyNDArray = np.ndarray[Any, np.dtype[Any]]


def tensor_over(array: AnyNDArray) -> Any:
    """A tensor of the elements of a new array, in the same memory if that is aligned.

    Nobody may write to the array any more.
    """
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        return tf.bitcast(tensor_over(array.view(np.uint16)), tf.bfloat16)
    is_taken = (
        array.flags.c_contiguous
        and array.flags.writeable
        and array.nbytes > 0
        and array.__array_interface__["data"][0] % _ALIGNMENT == 0
    )
    if is_taken:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


class _Memory:
    """A tensor's elements for NumPy, which take them for writable, as those of a new tensor are."""

    def __init__(self, array: AnyNDArray) -> None:
        self.held = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def for_engine(x: Any, *, written: bool) -> tuple[AnyNDArray, DType | None]:
    """See `ringdl._arrays.Framework.for_engine`: the same memory, as NumPy's."""
    if not isinstance(x, tf.__internal__.EagerTensor):
        raise UsageError(
            f"{x!r} has no elements yet, or is a variable: inside of tf.function call "
            "ringdl.tensorflow's functions, as ringdl.tensorflow.allreduce; of a variable pass "
            "tf.convert_to_tensor(variable)"
        )
    if written:
        raise UsageError(
            "a tensor of TensorFlow does not change; call the form without an underscore, which "
            "returns a new one"
        )
    array = np.asarray(x)
    if array.dtype == object or array.nbytes == 0:
        return of_numpy.for_engine(array.copy(), written=False)
    bits = np.asarray(_Memory(array.view(f"V{array.itemsize}")))
    return of_numpy.for_engine(bits.view(array.dtype), written=False)


def handed(array: AnyNDArray) -> AnyNDArray:
    """See `ringdl._arrays.Framework.handed`."""
    return array


def in_numpy(x: Any) -> None:
    """See `ringdl._arrays.Framework.in_numpy`."""


def write_back(array: AnyNDArray, given: Any) -> None:
    """See `ringdl._arrays.Framework.write_back`: they share memory."""


def copy_of(x: Any) -> Any:
    """See `ringdl._arrays.Framework.copy_of`."""
    if not isinstance(x, tf.__internal__.EagerTensor):
        return x  # for_engine() reports what is wrong with it
    return Own(tf.raw_ops.DeepCopy(x=x))


def empty_like(like: Any, shape: Sequence[int]) -> Any:
    """See `ringdl._arrays.Framework.empty_like`."""
    return tf.raw_ops.Empty(shape=tuple(shape), dtype=like.dtype)


def from_bytes(like: Any, shape: Sequence[int], data: AnyNDArray) -> Any:
    """See `ringdl._arrays.Framework.from_bytes`."""
    return tensor_over(data.view(like.dtype.as_numpy_dtype).reshape(tuple(shape)))


def concatenated(arrays: Sequence[AnyNDArray]) -> AnyNDArray:
    """See `ringdl._arrays.Framework.concatenated`."""
    return of_numpy.concatenated(arrays)


def distribute(flat: AnyNDArray, arrays: Sequence[AnyNDArray]) -> None:
    """See `ringdl._arrays.Framework.distribute`."""
    of_numpy.distribute(flat, arrays)


def dtype_name(x: AnyNDArray) -> str:
    """See `ringdl._arrays.Framework.dtype_name`."""
    return str(x.dtype)

"""Arrays that are reduced together, in memory that is born shared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ringdl
from ringdl import _arrays
from ringdl._engine import Kind
from ringdl._reductions import Op
from ringdl._training.compression import AnyCompression, wire_of
from ringdl.tensorflow._graph import Array

Scales = tuple[float, float]
UNSCALED: Scales = (1.0, 1.0)

_ALIGNMENT = 64
"""Where tensors may begin, in bytes."""


def reduce(
    arrays: Sequence[Array],
    op: Op,
    communicator: ringdl.Communicator,
    key: str | None,
    compression: AnyCompression = None,
    scales: Scales = UNSCALED,
) -> list[Array]:
    """Reductions of arrays over the ranks, in new arrays. Collective.

    Those of one dtype are copied one behind the other into memory that the ranks of a host share,
    and are reduced there by one allreduce; the results are parts of it.

    Args:
        arrays: the same shapes and dtypes on all ranks; they stay as they are.
        op: any that `ringdl.allreduce` takes.
        communicator: the ranks.
        key: what the allreduces are matched by; None for their order.
        compression: what sums and averages of float32 travel as between hosts.
        scales: factors before and after: see `scale`.

    Raises:
        UsageError: an array of another dtype; other ranks get a MismatchError.
        MismatchError: on every rank, if they differ.
    """
    before, after = scales
    by_dtype: dict[np.dtype[np.generic], list[int]] = {}
    with communicator._telling(Kind.allreduce, key):
        wire = wire_of(compression) if op in (ringdl.Sum, ringdl.Average) else None
        for index, array in enumerate(arrays):
            if array.dtype not in by_dtype:
                _arrays.dtype_of(_arrays.operand(array, written=False))
            by_dtype.setdefault(array.dtype, []).append(index)
    results = list(arrays)
    for dtype, members in by_dtype.items():
        flat, parts = _placed([arrays[index] for index in members], communicator)
        for index, part in zip(members, parts, strict=True):
            if before == 1.0:
                np.copyto(part, arrays[index])
            else:
                scale(arrays[index], before, part)
            results[index] = part
        name = key if key is None or len(by_dtype) == 1 else f"{key} ({dtype})"
        if op is ringdl.Adasum:  # which takes each array for itself
            communicator.grouped_allreduce_(parts, op, name)
        else:
            its_wire = wire if dtype == np.float32 else None
            communicator.allreduce_(flat, op, name, compression=its_wire)
        if after != 1.0:
            for part in parts:
                scale(part, after, part)
    return results


def scale(array: Array, factor: float, result: Array) -> None:
    """Multiply: 16-bit floats in float32, integers in float64, cut towards zero."""
    is_double = array.dtype.kind in "biu" or array.itemsize == 8
    dtype = np.float64 if is_double else np.float32
    np.multiply(array, factor, out=result, dtype=dtype, casting="unsafe")


def _placed(
    arrays: Sequence[Array], communicator: ringdl.Communicator
) -> tuple[Array, list[Array]]:
    """New memory, and its parts for arrays of one dtype, each aligned as tensors are."""
    if len(arrays) == 1:
        alone = communicator.empty(arrays[0].shape, arrays[0].dtype)
        return alone, [alone]
    step = max(1, _ALIGNMENT // arrays[0].itemsize)
    begins = [0]
    for array in arrays:
        begins.append(begins[-1] + -(-array.size // step) * step)
    flat = communicator.empty(begins[-1], arrays[0].dtype)
    return flat, [
        flat[begin : begin + array.size].reshape(array.shape)
        for begin, array in zip(begins, arrays, strict=False)
    ]

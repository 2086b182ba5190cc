"""What the arrays hold, and what a collective must make of it, exactly.

A rank's array repeats a few small values: element i of rank r in run t is
``base[(i + r + t) % n]``. All sums and products of them are exact in the dtype whatever the order,
each rank's part matters, and a result left over from the run before is wrong. What is expected is
periodic too, so it takes no memory worth mentioning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringdl import _cuda, _engine
from ringdl.bench._collectives import Case

Array = NDArray[Any]

_PIECE = 1 << 16
"""Elements that are compared at once: few enough to stay in a cache."""


class Values:
    """The values of one case.

    Args:
        case: what is measured.
        rank: this rank.
        device: the number of the CUDA device where the arrays lie; None for the CPU's memory.
    """

    def __init__(self, case: Case, rank: int, device: int | None = None) -> None:
        self._case = case
        self._rank = rank
        self._base = base_values(case.dtype, case.op, case.ranks)
        self._long = np.resize(self._base, case.shape.send + len(self._base))
        self._there: _cuda.Array | None = None
        if device is not None:
            self._there = _cuda.Array(self._long.shape, case.dtype, device).set(self._long)

    def write(self, array: Array | _cuda.Array, run: int) -> None:
        """Give this rank's array the values of a run."""
        begin = (self._rank + run) % len(self._base)
        if isinstance(array, _cuda.Array):
            assert self._there is not None
            source = self._there.address + begin * array.dtype.itemsize
            _engine.cuda_copy(
                array.device, array.address, source, array.nbytes, _cuda.DEFAULT_STREAM
            )
        else:
            np.copyto(array, self._long[begin : begin + len(array)])

    def count_wrong(self, result: Array | _cuda.Array, run: int) -> int:
        """How many elements of this rank's result are not what they must be."""
        if isinstance(result, _cuda.Array):
            result = result.numpy()
        return count_wrong(result, expected(self._case, self._base, self._rank, run))


def base_values(dtype: np.dtype[Any], op: str | None, ranks: int) -> Array:
    """One period of what the arrays repeat."""
    if op is None:
        period = 13 if dtype == np.bool_ else 251
        top = 1 if dtype == np.bool_ else min(250, _largest_exact(dtype))
        return np.asarray(np.arange(period) % (top + 1), dtype)
    if dtype == np.bool_:  # sum and max are "or": one True in the window of some elements
        only: Array = np.arange(2 * ranks) == 0
        return only if op in ("sum", "max") else ~only
    if op == "prod":  # at most one rank contributes a factor
        return np.asarray(np.where(np.arange(ranks + 1) == 0, 2, 1), dtype)
    period = ranks + 16
    top = min(16, _largest_exact(dtype) // ranks)
    if top == 0:  # more ranks than the dtype can count: some elements get a 1 from one rank
        return np.asarray(np.arange(2 * ranks) == 0, dtype)
    return np.asarray(np.arange(period) % (top + 1), dtype)


def expected(case: Case, base: Array, rank: int, run: int) -> list[tuple[int, Array]]:
    """What a rank's result must be: blocks of a given length, each repeating its values."""
    shape, ranks = case.shape, case.ranks

    def of(other: int, first: int = 0) -> Array:
        return np.roll(base, -(other + run + first))

    if case.collective == "allreduce":
        return [(shape.receive, reduced([of(r) for r in range(ranks)], case.op))]
    if case.collective == "reducescatter":
        first = rank * shape.receive
        return [(shape.receive, reduced([of(r, first) for r in range(ranks)], case.op))]
    if case.collective == "broadcast":
        return [(shape.receive, of(case.root or 0))]
    if case.collective == "allgather":
        return [(shape.send, of(r)) for r in range(ranks)]
    part = shape.send // ranks
    return [(part, of(r, rank * part)) for r in range(ranks)]


def reduced(values: list[Array], op: str | None) -> Array:
    """The reduction of the ranks' values, exact."""
    dtype = values[0].dtype
    if dtype == np.bool_:
        stack = np.stack(values)
        return np.asarray(stack.any(axis=0) if op in ("sum", "max") else stack.all(axis=0))
    wide = np.stack([value.astype(np.float64) for value in values])
    if op == "avg":
        total = wide.sum(axis=0)
        if dtype.kind in "iu":
            return np.asarray(np.trunc(total / len(values)), dtype)
        single = np.float64 if dtype == np.float64 else np.float32  # what ringdl divides in
        return np.asarray(total.astype(single) / single(len(values)), dtype)
    combine = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op or ""]
    return np.asarray(combine.reduce(wide, axis=0), dtype)


def count_wrong(result: Array, blocks: list[tuple[int, Array]]) -> int:
    """How many elements differ from what blocks say; all, if there are too many or too few."""
    total = sum(count for count, _ in blocks)
    if result.shape != (total,):
        return max(total, 1)
    wrong = begin = 0
    for count, period in blocks:
        piece = np.resize(period, len(period) * (_PIECE // len(period) + 1))
        end = begin + count
        for first in range(begin, end, len(piece)):
            part = result[first : min(first + len(piece), end)]
            wrong += int(np.count_nonzero(part != piece[: len(part)]))
        begin = end
    return wrong


def _largest_exact(dtype: np.dtype[Any]) -> int:
    """The largest number up to which the dtype has all integers."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    import ml_dtypes

    return int(2 ** (ml_dtypes.finfo(dtype).nmant + 1))  # type: ignore[no-untyped-call]

"""The collectives: what size and count mean, the bus bandwidth's factors, and ringdl's calls.

Sizes, counts and factors are those of nccl-tests, as its doc/PERFORMANCE.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import ringdl
from ringdl._engine import Reduction

if TYPE_CHECKING:
    from ringdl import Communicator
    from ringdl.bench._timing import Run

REDUCTIONS = {
    "sum": Reduction.Sum,
    "prod": Reduction.Product,
    "max": Reduction.Max,
    "min": Reduction.Min,
    "avg": Reduction.Average,
}

_GRANULE_BYTES = 16
"""A rank's part of an array begins at a multiple of this, as in nccl-tests."""


@dataclass(frozen=True)
class Shape:
    """How large a case is.

    Attributes:
        size: bytes that count for bandwidths: the whole array, over all ranks' parts.
        count: elements as nccl-tests prints them: a rank's part where the array is dealt out.
        send: elements of a rank's array.
        receive: elements of its result.
    """

    size: int
    count: int
    send: int
    receive: int


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        collective: its name.
        dtype: of the arrays.
        op: the reduction's name, or None.
        root: the rank, or None.
        ranks: how many take part.
        shape: how large it is.
    """

    collective: str
    dtype: np.dtype[Any]
    op: str | None
    root: int | None
    ranks: int
    shape: Shape


def shape_of(collective: str, size: int, item_bytes: int, ranks: int) -> Shape:
    """What a size in bytes means: it is rounded down to whole elements and parts.

    Args:
        collective: its name.
        size: what the user asks for.
        item_bytes: of an element.
        ranks: how many take part.
    """
    count = size // item_bytes
    if collective in ("allreduce", "broadcast"):
        return Shape(count * item_bytes, count, count, count)
    granule = max(1, _GRANULE_BYTES // item_bytes)
    part = count // ranks // granule * granule
    whole = part * ranks
    return Shape(
        whole * item_bytes,
        part,
        send=part if collective == "allgather" else whole,
        receive=part if collective == "reducescatter" else whole,
    )


def bus_factor(collective: str, ranks: int) -> float:
    """What algbw is multiplied with to get what each rank's link carries at least."""
    if collective == "broadcast":
        return 1.0
    once = (ranks - 1) / ranks
    return 2 * once if collective == "allreduce" else once


def bandwidths(case: Case, seconds: float) -> tuple[float, float]:
    """The algorithm's and the bus bandwidth, in GB/s."""
    algbw = case.shape.size / seconds / 1e9
    return algbw, algbw * bus_factor(case.collective, case.ranks)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of one of ringdl's names."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def out_of_place(communicator: Communicator, case: Case) -> Run:
    """How ringdl does it into a new array."""
    if case.collective == "broadcast":
        root = case.root or 0
        return lambda slot: communicator.broadcast(slot.source, root)
    if case.op is not None:
        op = REDUCTIONS[case.op]
        if case.collective == "allreduce":
            return lambda slot: communicator.allreduce(slot.source, op)
        return lambda slot: communicator.reducescatter(slot.source, op)
    if case.collective == "allgather":
        return lambda slot: communicator.allgather(slot.source)
    return lambda slot: communicator.alltoall(slot.source)


def in_place(communicator: Communicator, case: Case) -> Run | None:
    """How ringdl does it in place, where it has such a form."""
    if case.collective == "broadcast":
        root = case.root or 0
        return lambda slot: communicator.broadcast_(slot.source, root)
    if case.collective == "allreduce":
        op = REDUCTIONS[case.op or "sum"]
        # As programs call it; the method of the same communicator takes 0.1 us longer.
        return lambda slot: ringdl.allreduce_(slot.source, op)
    return None


def by_algorithm(communicator: Communicator, case: Case, algorithm: Any) -> Run:
    """How ringdl reduces in place when the algorithm is not left to it."""
    op = REDUCTIONS[case.op or "sum"]
    call: Callable[..., Any] = communicator.allreduce_
    return lambda slot: call(slot.source, op, algorithm=algorithm)

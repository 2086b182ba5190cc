"""What ranks have to agree on before arrays of theirs are put together and added up."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import ringdl


@dataclass(frozen=True)
class Spec:
    """Of one array: what is the same on all ranks, and how messages call it.

    Attributes:
        shape: None if it is not known, as its extents may be.
        dtype: its name.
        name: on this rank.
        is_sparse: whether it is rows of a ``tf.IndexedSlices``.
        is_missing: whether this rank has none.
    """

    shape: tuple[int | None, ...] | None
    dtype: str
    name: str
    is_sparse: bool = False
    is_missing: bool = False

    def terms(self) -> tuple[Any, ...]:
        """What is compared."""
        return self.shape, self.dtype, self.is_sparse

    def __str__(self) -> str:
        if self.is_missing:
            return "None"
        shape = "" if self.shape is None else list(self.shape)
        return f"{'tf.IndexedSlices ' if self.is_sparse else ''}{self.dtype}{shape}"


class Totals(NamedTuple):
    """What ranks have told one another.

    Attributes:
        ranks: how many there are that have not joined.
        lacking: how many of the arrays they lack.
        comparing: how many of them want to compare variables.
    """

    ranks: int
    lacking: int
    comparing: int


def agree(
    specs: Sequence[Spec],
    communicator: ringdl.Communicator,
    key: str | None,
    what: str,
    lacking: int = 0,
    *,
    compares: bool = False,
) -> Totals:
    """Raise on every rank unless all have the same arrays, in one order. Collective.

    By one small allreduce of a number made from the specs: the numbers of some ranks are equal if
    the square of their sum is that often the sum of their squares.

    Args:
        specs: this rank's.
        communicator: the ranks.
        key: what the collectives are matched by; None for their order.
        what: the beginning of the error's sentence.
        lacking: how many of the arrays this rank lacks.
        compares: whether this rank wants to compare variables.

    Raises:
        MismatchError: on every rank.
    """
    number = zlib.crc32(repr([spec.terms() for spec in specs]).encode()) >> 9
    note = np.array([1, number, number**2, lacking, compares], np.int64)
    communicator.allreduce_(note, ringdl.Sum, key)
    count, total, squares, *told = note.tolist()
    if count * squares != total**2:
        every = communicator.allgather_object([*specs], key and f"{key} (specs)")
        raise ringdl.MismatchError(
            f"{what} differ: {_difference(every)}; pass the same ones in the same order on all "
            "ranks (with sparse_as_dense=True tf.IndexedSlices become tensors)"
        )
    return Totals(count, *told)


def _difference(every: Sequence[Sequence[Spec]]) -> str:
    """The first one, between rank 0 and another rank."""
    first = every[0]
    for rank, its in enumerate(every):
        for own, other in zip(first, its, strict=False):
            if own.terms() != other.terms():
                return f"the {own.name} is {own} on rank 0, but {other} on rank {rank}"
        if len(its) != len(first):
            return f"there are {len(first)} on rank 0, but {len(its)} on rank {rank}"
    return "in what only some ranks have seen"  # which have joined meanwhile

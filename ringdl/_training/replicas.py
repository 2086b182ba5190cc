"""Equal replicas: broadcast the arrays of one rank, find those that differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

import ringdl
from ringdl._steps import ranks_text

_DIGEST_BYTES = 16

_ALONE_BYTES = 1 << 20
"""Larger arrays are broadcast where they are: to copy them costs more than a call."""

_FUSED_BYTES = 25 << 20
"""Smaller ones are broadcast together, up to this many bytes at once."""

_ALIGNMENT = 16
"""Of an array in a flat buffer: the bytes of the largest element."""

_BROADCASTS = ("broadcasts of replicas",)

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
ArraySpec: TypeAlias = tuple[str, tuple[int, ...], str]
"""An array's name, shape and dtype."""


class Replica(Protocol):
    """A framework's array, of any strides; each rank holds one."""

    @property
    def nbytes(self) -> int:
        """Of all its elements."""

    def read(self) -> Bytes:
        """The elements in row-major order: the array's own memory if they lie there like that."""

    def write(self, elements: Bytes) -> None:
        """Overwrite the elements; nothing is to be done if these are the array's own memory."""


def agree_with_root(
    specs: Sequence[ArraySpec],
    unfit: str | None,
    root: int,
    communicator: ringdl.Communicator,
    call: str,
) -> list[str]:
    """Raise on every rank unless all have arrays like the root's, in any order. Collective.

    Args:
        specs: this rank's arrays.
        unfit: why they cannot be broadcast, if they cannot.
        root: a rank.
        communicator: the ranks.
        call: what messages begin with.

    Returns:
        The names in the root's order.

    Raises:
        MismatchError: on every rank.
    """
    root_specs = communicator.broadcast_object(specs, root)
    difference = unfit or _first_difference(specs, root_specs, communicator.rank)
    own = np.array([[communicator.rank, difference is not None]])
    differing = [rank for rank, differs in communicator.allgather(own).tolist() if differs]
    if differing:
        why = communicator.broadcast_object(difference, differing[0])
        raise ringdl.MismatchError(f"{call}: {why}")
    return [name for name, _, _ in root_specs]


def broadcast(replicas: Iterable[Replica], root: int, communicator: ringdl.Communicator) -> None:
    """Overwrite arrays, of the same sizes on every rank, with those of the root. Collective."""
    communicator._shared.made[_BROADCASTS] += 1
    together: list[Replica] = []
    total = 0
    for replica in replicas:
        if replica.nbytes > _ALONE_BYTES:
            _broadcast_one(replica, root, communicator)
            continue
        if total + replica.nbytes > _FUSED_BYTES:
            _broadcast_together(together, root, communicator)
            together, total = [], 0
        if replica.nbytes > 0:
            together.append(replica)
            total += replica.nbytes
    _broadcast_together(together, root, communicator)


def were_broadcast(communicator: ringdl.Communicator) -> bool:
    """Whether this rank has got replicas of another one, or sent its own, in this epoch."""
    return communicator._shared.made[_BROADCASTS] > 0


def check(
    named: Sequence[tuple[str, Replica]],
    communicator: ringdl.Communicator,
    name: str,
    how_to_mend: str,
) -> None:
    """Compare the bits of all ranks' parameters. Collective; reads them once.

    Nothing is done where RINGDL_CHECK_REPLICAS=0.

    Args:
        named: the parameters, under the same names in the same order on every rank.
        communicator: the ranks.
        name: what the collectives are matched by.
        how_to_mend: the end of the error's sentence.

    Raises:
        MismatchError: on every rank, if they differ; names the first one and the ranks.
    """
    if communicator.size == 1 or not communicator._shared.checks_replicas:
        return
    digests = np.stack([_digest(replica) for _, replica in named])
    combined = np.frombuffer(hashlib.sha256(digests.tobytes()).digest()[:_DIGEST_BYTES], np.uint8)
    if _all_equal(communicator.allgather(combined[None].copy(), name=name)):
        return
    gathered = communicator.allgather(digests[None], name=f"{name}.each")
    index = next(index for index in range(len(digests)) if not _all_equal(gathered[:, index]))
    differing = [
        rank for rank in range(len(gathered)) if (gathered[rank, index] != gathered[0, index]).any()
    ]
    raise ringdl.MismatchError(
        f"the replicas differ: in the parameter {named[index][0]!r}, "
        f"{ranks_text(differing)} {'has' if len(differing) == 1 else 'have'} other values than "
        f"rank 0; {how_to_mend}"
    )


def _broadcast_together(
    replicas: Sequence[Replica], root: int, communicator: ringdl.Communicator
) -> None:
    if len(replicas) < 2:
        for replica in replicas:
            _broadcast_one(replica, root, communicator)
        return
    padded = [-(-replica.nbytes // _ALIGNMENT) * _ALIGNMENT for replica in replicas]
    flat = np.zeros(sum(padded), np.uint8)
    begins = itertools.accumulate(padded, initial=0)
    pieces = [
        flat[begin : begin + replica.nbytes]
        for begin, replica in zip(begins, replicas, strict=False)
    ]
    if communicator.rank == root:
        for piece, replica in zip(pieces, replicas, strict=True):
            piece[:] = replica.read()
    communicator.broadcast_(flat, root)
    if communicator.rank != root:
        for piece, replica in zip(pieces, replicas, strict=True):
            replica.write(piece)


def _broadcast_one(replica: Replica, root: int, communicator: ringdl.Communicator) -> None:
    if replica.nbytes == 0:
        return
    elements = replica.read()
    communicator.broadcast_(elements, root)
    if communicator.rank != root:
        replica.write(elements)


def _digest(replica: Replica) -> Bytes:
    return np.frombuffer(hashlib.sha256(replica.read().data).digest()[:_DIGEST_BYTES], np.uint8)


def _all_equal(rows: Bytes) -> bool:
    return bool((rows == rows[0]).all())


def _first_difference(
    specs: Sequence[ArraySpec], root_specs: Sequence[ArraySpec], rank: int
) -> str | None:
    """How these specs differ from the root's, in any order; None if they do not."""
    own = {name: (shape, dtype) for name, shape, dtype in specs}
    root = {name: (shape, dtype) for name, shape, dtype in root_specs}
    for name in own | root:
        if own.get(name) != root.get(name):
            here, there = (_spec_text(side.get(name)) for side in (own, root))
            return (
                f"{name!r} is {here} on rank {rank}, but {there} on the root rank; build the same "
                "model on all ranks"
            )
    return None


def _spec_text(spec: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if spec is None else f"{spec[1]}{list(spec[0])}"

"""What the ranks of one estimator tell one another while it is fitted.

An error that one rank has raises on all of them: each function that runs on one rank only, or on
its own rows, is passed to a method here, which tells the others of its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import numpy as np

import ringdl
from ringdl._engine import Kind

Array: TypeAlias = np.ndarray[Any, Any]
Result = TypeVar("Result")

NAME = "DistributedEstimator"
"""What its collectives are matched by, and what errors name."""


class Ranks:
    """The ranks of a communicator.

    Every method is collective, and raises MismatchError on the ranks where all went well if a
    function raised on another one.
    """

    def __init__(self, communicator: ringdl.Communicator) -> None:
        self.communicator = communicator
        self._buckets: tuple[Any, ringdl.Buckets] | None = None

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.communicator.size

    def together(self, local: Callable[[], Result]) -> Result:
        """What a function returns on this rank, once it has returned on all."""
        with self.communicator._telling(Kind.barrier, NAME):
            result = local()
        self.communicator.barrier(name=NAME)
        return result

    def telling(self) -> AbstractContextManager[None]:
        """Around what precedes `gathered`: the other ranks hear of an error raised in it."""
        return self.communicator._telling(Kind.allgather, NAME)

    def gathered(self, local: Callable[[], Result]) -> list[Result]:
        """What a function returns on each rank, in rank order; it can be pickled."""
        with self.telling():
            own = local()
        return self.communicator.allgather_object(own, name=NAME)

    def from_rank_0(self, local: Callable[[], Result]) -> Result:
        """What a function returns on rank 0, which alone calls it; it can be pickled.

        Models are completed so: processors that round otherwise never part the ranks.
        """
        result: Any = None
        with self.communicator._telling(Kind.broadcast, NAME):
            if self.rank == 0:
                result = local()
        return self.communicator.broadcast_object(result, name=NAME)  # type: ignore[no-any-return]

    def sums(self, local: Callable[[], Sequence[Any]]) -> list[Array]:
        """The sums over all ranks of the arrays or numbers that a function returns, in float64."""
        with self.communicator._telling(Kind.allreduce, NAME):
            own = [np.asarray(each, np.float64) for each in local()]
            flat = np.concatenate([each.ravel() for each in own])
        self.communicator.allreduce_(flat, ringdl.Sum, name=NAME)
        ends = np.cumsum([each.size for each in own])[:-1]
        parts = np.split(flat, ends)
        return [part.reshape(each.shape) for part, each in zip(parts, own, strict=True)]

    def merged(self, own: Array, merge: Callable[[Array, Array], Array]) -> Array:
        """All ranks' arrays, merged pairwise up a binary tree, in rank order; on rank 0.

        Elsewhere what this rank has merged on the way. No rank holds more than two of them.

        Args:
            own: of one dtype and number of axes on all ranks.
            merge: makes one array of two neighbours', the lower rank's first.
        """
        its, distance = self.communicator, 1
        while distance < self.size:
            if self.rank % (2 * distance):
                to = self.rank - distance
                its.send(np.array(own.shape), to, f"{NAME}.shape")
                its.send(own, to, NAME)
                break
            if self.rank + distance < self.size:
                source = self.rank + distance
                shape = its.recv_(np.empty(own.ndim, np.int64), source, f"{NAME}.shape")
                own = merge(own, its.recv_(np.empty(shape, own.dtype), source, NAME))
            distance *= 2
        return own

    def buckets(self, specs: Sequence[tuple[str, tuple[int, ...], str]]) -> ringdl.Buckets:
        """Buckets that sum such gradients: those of the call before, if it was for the same."""
        key = [*specs], self.communicator.epoch
        if self._buckets is None or self._buckets[0] != key:
            made = ringdl.Buckets(specs, op=ringdl.Sum, communicator=self.communicator)
            self._buckets = key, made
        return self._buckets[1]

"""Views into ``ringdl.Buckets`` for gradients, and a note that travels with them.

The note says at which step of the optimizer a rank is, and whether it holds a sparse gradient that
the others may not know. It lies behind the last gradient of the last bucket, so it costs no message
of its own; the step is one element set out of eight, so any difference of steps but a multiple of
eight is detected in each dtype, after sums and averages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic

import numpy as np

import ringdl
from ringdl._buckets import AGREEING
from ringdl._reductions import CompressionName
from ringdl._training.store import A, Store
from ringdl._training.texts import ranks_text

_RESIDUES = 8
_NOTE = "ringdl.step"


@dataclass(frozen=True)
class Round:
    """What is known once a round has ended, the same on all ranks.

    Attributes:
        produced: the gradients that some rank produced.
        is_in_step: whether all ranks are at the same step.
        has_sparse: whether some rank holds a sparse gradient.
    """

    produced: Collection[int]
    is_in_step: bool
    has_sparse: bool


class Rounds(Generic[A]):
    """Views into buckets for some of a store's gradients, averaged round by round. Collective.

    Args:
        store: where the gradients are.
        indices: which ones, in the order of registration; the same on all ranks.
        op: Average or Sum over the ranks.
        compression: as `ringdl.Buckets` takes it.
        communicator: the ranks.
        predivisor: of gradients before they are summed; results are multiplied by it.

    Raises:
        MismatchError: on every rank, if names, shapes, dtypes or order differ.
    """

    def __init__(
        self,
        store: Store[A],
        indices: Iterable[int],
        op: ringdl.Reduction,
        compression: CompressionName | None,
        communicator: ringdl.Communicator,
        predivisor: float = 1.0,
    ) -> None:
        self._positions = {index: position for position, index in enumerate(indices, start=1)}
        specs = [store.specs[index] for index in self._positions]
        dtype = specs[0][2] if specs else "float32"
        try:
            self._buckets = ringdl.Buckets(
                [(_NOTE, (_RESIDUES + 1,), dtype), *specs],
                op=op,
                compression=compression,
                communicator=communicator,
            )
        except ringdl.MismatchError as error:
            if AGREEING not in str(error) or " cannot make " in str(error):
                raise
            raise ringdl.MismatchError(
                f"{error}. Every rank has to wrap its optimizer: {store.how_to_wrap}"
            ) from None
        self._store = store
        self._note = self._buckets.view(0)
        self._is_noted = False
        self._predivisor = predivisor
        self.ready: set[int] = set()
        """The gradients that this rank has marked ready in this round."""
        self.views: dict[int, A] = {
            index: store.view(index, self._buckets.dlpack(position))
            for index, position in self._positions.items()
        }
        """By index, with the strides of the spec: always the same memory."""

    def mark_ready(self, index: int) -> None:
        """Gradient ``index`` is in its view; the last one of a bucket starts its allreduce."""
        self.ready.add(index)
        if self._predivisor != 1.0:
            self._store.scale(self.views[index], 1 / self._predivisor)
        self._buckets.ready(self._positions[index])

    def end(self, step: int, has_sparse: bool) -> Round:
        """Flush what is not ready (as zeros), wait, and begin the next round. Collective.

        Args:
            step: how many steps of the optimizer this rank has ended.
            has_sparse: whether it holds a sparse gradient that is not known to be sparse.

        Raises:
            StallError: some rank has not arrived in time; call again.
        """
        if not self._is_noted:
            self._is_noted = True
            self._note[:] = 0
            self._note[step % _RESIDUES] = 1
            self._note[_RESIDUES] = has_sparse
            self._buckets.ready(0)
        produced = self._buckets.wait()
        self._is_noted = False
        self.ready.clear()
        averaged = {index for index, position in self._positions.items() if produced[position]}
        if self._predivisor != 1.0:
            for index in averaged:
                self._store.scale(self.views[index], self._predivisor)
        return Round(
            averaged,
            int(np.count_nonzero(self._note[:_RESIDUES])) == 1,
            bool(self._note[_RESIDUES] != 0),
        )


def raise_out_of_step(step: int, communicator: ringdl.Communicator, name: str) -> None:
    """Raise on all ranks, naming each one's step. Collective, after a round out of step."""
    steps = communicator.allgather(np.array([step]), name=name).tolist()
    where = " and ".join(
        f"step {each + 1} on {ranks_text([r for r, other in enumerate(steps) if other == each])}"
        for each in sorted(set(steps))
    )
    raise ringdl.MismatchError(
        f"the ranks are out of step: gradients met that belong to {where}; every rank must call "
        "backward() equally often between two steps (or not at all), and step() equally often; one "
        "that has no batch left calls join()"
    )

"""Views into ``ringdl.Buckets`` for gradients, and a note that travels with them.

Gradients on each device have buckets of their own. The note says at which step of the optimizer a
rank is, whether it holds a sparse gradient that the others may not know, and whether an error kept
it from having gradients. It lies behind the last gradient of the last bucket in the CPU's memory,
so it costs no message of its own there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic

import ringdl
from ringdl import _steps
from ringdl._buckets import AGREEING
from ringdl._engine import DeviceArray
from ringdl._reductions import CompressionName
from ringdl._training.store import A, Store

_NOTE = "ringdl.step"


@dataclass(frozen=True)
class Round:
    """What is known once a round has ended, the same on all ranks.

    Attributes:
        produced: the gradients that some rank produced.
        is_in_step: whether all ranks are at the same step.
        has_sparse: whether some rank holds a sparse gradient.
        has_failed: whether an error has kept some rank from having gradients.
    """

    produced: Collection[int]
    is_in_step: bool
    has_sparse: bool
    has_failed: bool


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
        by_device: dict[int | None, list[int]] = {None: []}  # first: the note is there
        for index in indices:
            by_device.setdefault(store.device(index), []).append(index)
        self._all: list[ringdl.Buckets] = []
        self._places: dict[int, tuple[ringdl.Buckets, int]] = {}
        try:
            for device, members in by_device.items():
                specs = [store.specs[index] for index in members]
                if device is None:
                    specs.insert(
                        0, (_NOTE, (_steps.RESIDUES + 2,), specs[0][2] if specs else "float32", ())
                    )
                buckets = ringdl.Buckets(
                    specs,
                    op=op,
                    compression=compression,
                    communicator=communicator,
                    device=device,
                )
                self._all.append(buckets)
                for position, index in enumerate(members, start=device is None):
                    self._places[index] = buckets, position
        except ringdl.MismatchError as error:
            if AGREEING not in str(error) or " cannot make " in str(error):
                raise
            raise ringdl.MismatchError(
                f"{error}. Every rank has to wrap its optimizer: {store.how_to_wrap}"
            ) from None
        self._store = store
        self._note = self._all[0].view(0)
        self._is_noted = False
        self._produced: list[list[bool]] = []
        """Of the buckets that have ended in this round, in the order of `_all`."""
        self._predivisor = predivisor
        self.ready: set[int] = set()
        """The gradients that this rank has marked ready in this round."""
        self.views: dict[int, A] = {index: self._make_view(index) for index in self._places}
        """By index, with the strides of the spec."""
        self._view_places = {index: store.place(view) for index, view in self.views.items()}
        self._packed: dict[tuple[int, int], list[int]] = {}
        """By buckets and bucket, the gradients that are elsewhere until it is launched."""

    def view(self, index: int) -> A | None:
        """The view of a gradient, made anew if a script has moved its elements elsewhere."""
        view = self.views.get(index)
        if view is not None and self._store.place(view) != self._view_places[index]:
            view = self.views[index] = self._make_view(index)
        return view

    def _make_view(self, index: int) -> A:
        buckets, position = self._places[index]
        return self._store.view(index, buckets.dlpack(position))

    def mark_ready(self, index: int) -> None:
        """Gradient ``index`` is in its view; the last one of a bucket starts its allreduce."""
        if self._predivisor != 1.0:
            self._store.scale(self.views[index], 1 / self._predivisor)
        self._launch(index, None)

    def pack(self, index: int, gradient: A) -> bool:
        """The same of a gradient that is elsewhere on its device: it is copied with its bucket's.

        The store gets the view in its place once that is launched.

        Returns:
            False if it has to be in its view: there, nothing was done.
        """
        buckets, _ = self._places[index]
        if buckets.device is None or not buckets.packs():
            return False
        source = self._store.source(gradient, self.views[index])
        if source is None:
            return False
        self._launch(index, source)
        return True

    def _launch(self, index: int, source: DeviceArray | None) -> None:
        self.ready.add(index)
        buckets, position = self._places[index]
        if buckets.device is None:
            buckets.ready(position)
            return
        key = id(buckets), buckets.bucket_of(position)
        if source is not None:
            self._packed.setdefault(key, []).append(index)
        if buckets.ready(position, self._stream_of(buckets), source, 1 / self._predivisor):
            for packed in self._packed.pop(key, []):
                self._store.set(packed, self.views[packed])

    def end(self, step: int, has_sparse: bool, has_failed: bool = False) -> Round:
        """Flush what is not ready (as zeros), wait, and begin the next round. Collective.

        Args:
            step: how many steps of the optimizer this rank has ended.
            has_sparse: whether it holds a sparse gradient that is not known to be sparse.
            has_failed: whether it has no gradients because of an error.

        Raises:
            StallError: some rank has not arrived in time; call again.
        """
        if not self._is_noted:
            self._is_noted = True
            _steps.mark(self._note[: _steps.RESIDUES], step)
            self._note[_steps.RESIDUES :] = has_sparse, has_failed
            self._all[0].ready(0)
        for buckets in self._all[len(self._produced) :]:  # those that a StallError has left
            self._produced.append(buckets.wait(stream=self._stream_of(buckets)))
        produced = dict(zip(map(id, self._all), self._produced, strict=True))
        self._produced = []
        self._is_noted = False
        self.ready.clear()
        self._packed.clear()
        averaged = {
            index
            for index, (buckets, position) in self._places.items()
            if produced[id(buckets)][position]
        }
        if self._predivisor != 1.0:
            for index in averaged:
                self._store.scale(self.views[index], self._predivisor)
        return Round(
            averaged,
            _steps.are_equal(self._note[: _steps.RESIDUES]),
            *(bool(flag) for flag in self._note[_steps.RESIDUES :] != 0),
        )

    def _stream_of(self, buckets: ringdl.Buckets) -> int:
        return 0 if buckets.device is None else self._store.stream(buckets.device)


def raise_failed(error: Exception | None, step: int, ranks: ringdl.Communicator, name: str) -> None:
    """Raise on all ranks, saying whose error it was. Collective, after a round with a failed rank.

    Args:
        error: this rank's, if it has failed.
        step: how many steps it has ended.
        ranks: the communicator.
        name: what the collective is matched by.
    """
    texts = ranks.allgather_object(str(error) if error else None, name=name)
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise ringdl.MismatchError(f"rank {rank} has no gradients for step {step + 1}: {text}")

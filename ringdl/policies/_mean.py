"""The mean of all ranks' arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringdl import _steps
from ringdl._buckets import Buckets
from ringdl.policies._policy import Array, Model

_NOTE = "ringdl.step"


class Mean:
    """The mean over all ranks of arrays, in memory that the ranks of a host share.

    A rank that has joined counts as none. Collective: ranks construct in the same order, and call
    `begin` equally often.

    Args:
        like: floating-point arrays; the same names, shapes and dtypes on all ranks.
        model: whose they are.
        every: how many steps of the optimizer lie between two means.

    Raises:
        MismatchError: on every rank, if they differ.
    """

    def __init__(self, like: Mapping[str, Array], model: Model, every: int) -> None:
        self._model, self._every = model, every
        specs: list[Any] = [(name, each.shape, each.dtype) for name, each in like.items()]
        note = (_NOTE, (_steps.RESIDUES + 1,), "float32")
        self._buckets = Buckets([note, *specs], communicator=model.communicator)
        self._note, *views = self._buckets.views()
        self._views: dict[str, Array] = dict(zip(like, views, strict=True))

    def begin(self, arrays: Mapping[str, Array]) -> None:
        """Start the mean of these, which are copied. What `end` has returned is overwritten."""
        for index, (name, view) in reversed([*enumerate(self._views.items(), start=1)]):
            view[...] = arrays[name]
            self._buckets.ready(index)
        self._note[-1] = 1
        _steps.mark(self._note[:-1], self._model.step // self._every)
        self._buckets.ready(0)

    def end(self) -> Mapping[str, Array]:
        """Wait for the mean: the same bits on all ranks. It is memory of this object.

        Raises:
            MismatchError: ranks have made different numbers of steps; on all of them.
            StallError: some rank has not begun in time; call again.
        """
        self._buckets.wait()
        if not _steps.are_equal(self._note[:-1]):
            name, rule = f"{self._model.key}.steps", "call step() equally often"
            _steps.raise_out_of_step(
                self._model.step - 1, self._model.communicator, name, "means", rule
            )
        active = float(self._note[-1])
        if active != 1.0:  # some have joined
            for view in self._views.values():
                view /= active
        return self._views

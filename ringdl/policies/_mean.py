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
        rule: what every rank must do, if some are out of step.

    Raises:
        MismatchError: on every rank, if they differ.
    """

    def __init__(
        self, like: Mapping[str, Array], model: Model, rule: str = "call step() equally often"
    ) -> None:
        self._model, self._rule = model, rule
        specs: list[Any] = [(name, each.shape, each.dtype) for name, each in like.items()]
        note = (_NOTE, (_steps.RESIDUES + 1 + model.communicator.size,), "float32")
        self._buckets = Buckets([note, *specs], communicator=model.communicator)
        note, *views = self._buckets.views()
        self._step, self._weight = note[: _steps.RESIDUES], note[_steps.RESIDUES :][:1]
        self._told = note[_steps.RESIDUES + 1 :]
        self._views: dict[str, Array] = dict(zip(like, views, strict=True))

    def begin(
        self, arrays: Mapping[str, Array], number: int, weight: float = 1.0, told: float = 0.0
    ) -> None:
        """Start the mean of these, which are copied. What `end` has returned is overwritten.

        Args:
            arrays: all of them.
            number: of the mean. Ranks whose numbers differ are out of step.
            weight: what this rank's arrays count.
            told: a number for the other ranks.
        """
        for index, (name, view) in reversed([*enumerate(self._views.items(), start=1)]):
            view[...] = arrays[name] if weight == 1 else arrays[name] * weight
            self._buckets.ready(index)
        self._weight[0] = weight
        self._told[...] = 0
        self._told[self._model.communicator.rank] = told
        _steps.mark(self._step, number)
        self._buckets.ready(0)

    def end(self) -> Mapping[str, Array]:
        """Wait for the mean: the same bits on all ranks. It is memory of this object.

        Raises:
            MismatchError: ranks have made different numbers of steps; on all of them.
            StallError: some rank has not begun in time.
        """
        self._buckets.wait()
        if not _steps.are_equal(self._step):
            name = f"{self._model.key}.steps"
            _steps.raise_out_of_step(
                self._model.step - 1, self._model.communicator, name, "means", self._rule
            )
        weight = float(self._weight[0])
        if weight != 1:  # some have joined, or count less
            for view in self._views.values():
                view /= weight
        return self._views

    @property
    def told(self) -> list[float]:
        """What each rank has told with the last mean; 0 of one that has joined."""
        told: list[float] = (self._told * len(self._told)).tolist()
        return told


def average(
    mean: Mean, arrays: Mapping[str, Array], number: int, weight: float = 1.0, told: float = 0.0
) -> None:
    """Write the mean into the arrays. Collective: see `Mean.begin`."""
    mean.begin(arrays, number, weight, told)
    for name, each in mean.end().items():
        arrays[name][...] = each

"""Keras on JAX: gradients are averaged inside of the compiled training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdl._reductions import wire_dtype
from ringdl._training.compression import wire_of
from ringdl._training.process_sets import communicator_of
from ringdl.jax import _plan
from ringdl.jax._gradients import reduce_tree, users
from ringdl.jax._ranks import ranks_of
from ringdl.keras._averaging import HOW_TO_MEND, Options


class BackendAveraging:
    """See `Averaging`."""

    def __init__(self, named: Sequence[tuple[str, Any]], options: Options) -> None:
        self._named = named
        self._predivisor = options.predivisor
        wire = wire_dtype(wire_of(options.compression))
        self._options = _plan.Options(options.op, wire=wire, how_to_mend=HOW_TO_MEND)
        self._communicator = communicator_of(options.process_set)
        self._user = next(users)

    def average(self, gradients: Sequence[Any], values: Sequence[Any] | None) -> list[Any]:
        """See `Averaging`."""
        names = [name for name, _ in self._named]
        given = {
            name: gradient if self._predivisor == 1.0 else gradient / self._predivisor
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None
        }
        its_values = [variable.value for _, variable in self._named] if values is None else values
        known = zip(names, its_values, strict=True)
        parameters = {name: value for name, value in known if name in given}
        ranks = ranks_of(self._communicator)
        averages = reduce_tree(given, parameters, ranks, self._options, self._user)
        if self._predivisor != 1.0:
            averages = {name: average * self._predivisor for name, average in averages.items()}
        return [averages.get(name) for name in names]

    def finish_step(self) -> None:
        """See `Averaging`."""

"""Keras on JAX: gradients are averaged inside of the compiled training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ringdl
from ringdl._training.compression import wire_of
from ringdl._training.process_sets import communicator_of
from ringdl.jax import average_gradients
from ringdl.keras._averaging import Options


class BackendAveraging:
    """See `Averaging`."""

    def __init__(self, named: Sequence[tuple[str, Any]], options: Options) -> None:
        if wire_of(options.compression) is not None:
            raise ringdl.UsageError(
                "inside of jax.jit gradients travel as they are; leave compression out"
            )
        self._named = named
        self._predivisor = options.predivisor
        self._transformation = average_gradients(
            options.op, communicator=communicator_of(options.process_set)
        )

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Averaging`."""
        names = [name for name, _ in self._named]
        given = {
            name: gradient if self._predivisor == 1.0 else gradient / self._predivisor
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None
        }
        averages, _ = self._transformation.update(given, self._transformation.init(given))
        if self._predivisor != 1.0:
            averages = {name: average * self._predivisor for name, average in averages.items()}
        return [averages.get(name) for name in names]

    def finish_step(self) -> None:
        """See `Averaging`."""

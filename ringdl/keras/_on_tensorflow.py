"""Keras on TensorFlow: gradients are averaged as those of `DistributedGradientTape`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdl.keras._averaging import Options
from ringdl.tensorflow import _gradients


class BackendAveraging:
    """See `Averaging`."""

    def __init__(self, named: Sequence[tuple[str, Any]], options: Options) -> None:
        self._variables = [variable for _, variable in named]
        self._options = _gradients.Options(
            options.op,
            options.compression,
            options.sparse_as_dense,
            options.predivisor,
            options.process_set,
            scale_local=False,
        )

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Averaging`."""
        return _gradients.average(self._variables, [*gradients], self._options)

    def finish_step(self) -> None:
        """See `Averaging`."""

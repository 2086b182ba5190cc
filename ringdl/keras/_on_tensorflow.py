"""Keras on TensorFlow: gradients are averaged as those of `DistributedGradientTape`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringdl._training import replicas
from ringdl._training.process_sets import communicator_of
from ringdl.keras._averaging import HOW_TO_MEND, Options
from ringdl.keras._state import VariableReplica
from ringdl.tensorflow import _gradients


class BackendAveraging:
    """See `Averaging`. Replicas are compared when the first step is made, or its graph.

    Those that are broadcast after it, or made in it, are compared as those of a tape.
    """

    def __init__(self, named: Sequence[tuple[str, Any]], options: Options) -> None:
        is_now = not options.expects_broadcast and all(map(_is_there, named))
        if is_now:
            with tf.init_scope():
                known = [(name, VariableReplica(variable)) for name, variable in named]
                ranks = communicator_of(options.process_set)
                replicas.check(known, ranks, "DistributedOptimizer.replicas", HOW_TO_MEND)
        self._variables = [variable for _, variable in named]
        self._options = _gradients.Options(
            options.op,
            options.compression,
            options.sparse_as_dense,
            options.predivisor,
            options.process_set,
            scale_local=False,
            compares=not is_now,
        )

    def average(self, gradients: Sequence[Any], values: Sequence[Any] | None) -> list[Any]:
        """See `Averaging`."""
        del values
        return _gradients.average(self._variables, [*gradients], self._options)

    def finish_step(self) -> None:
        """See `Averaging`."""


def _is_there(named: tuple[str, Any]) -> bool:
    """Whether a variable of Keras 3 has a value: not so before the graph runs that makes it.

    Those of Keras 2 are made, and broadcast, in the first step.
    """
    _, variable = named
    with tf.init_scope():
        return hasattr(variable, "path") and bool(
            tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        )

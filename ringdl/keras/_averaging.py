"""What averages the gradients of a Keras optimizer, one way for each backend."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ringdl
from ringdl._training import replicas
from ringdl._training.compression import AnyCompression
from ringdl._training.process_sets import AnySet, communicator_of

HOW_TO_WRAP = "optimizer = ringdl.keras.DistributedOptimizer(optimizer)"
HOW_TO_MEND = (
    "pass callbacks=[ringdl.keras.callbacks.BroadcastGlobalVariablesCallback(0)] to fit(), or call "
    "ringdl.keras.broadcast_variables(model.weights) before training"
)


@dataclass(frozen=True)
class Options:
    """What a wrapped optimizer was told. See `DistributedOptimizer`.

    Attributes:
        expects_broadcast: whether replicas become equal after the first step.
    """

    op: ringdl.Reduction
    compression: AnyCompression
    predivisor: float
    sparse_as_dense: bool
    process_set: AnySet
    expects_broadcast: bool = False


class Averaging(Protocol):
    """The gradients of one optimizer's variables."""

    def average(self, gradients: Sequence[Any], values: Sequence[Any] | None) -> list[Any]:
        """Averages in place of gradients, in the order of the variables. Collective.

        Args:
            gradients: of this rank; None where there is none.
            values: of the variables, where they do not hold them: on JAX, in a compiled step.
        """

    def finish_step(self) -> None:
        """The optimizer has applied them."""


def make_averaging(
    backend: str, variables: Sequence[Any], gradients: Sequence[Any], options: Options
) -> Averaging:
    """The one for a backend of Keras. Collective.

    Args:
        backend: its name.
        variables: the trained ones, in the same order on all ranks.
        gradients: the first ones, of which some may be None.
        options: of the optimizer.

    Raises:
        UsageError: there is none for this backend.
        MismatchError: on every rank, if variables differ in number, names, shapes or dtypes; on JAX
            also if some ranks lack a gradient that others have.
    """
    if backend not in ("torch", "jax", "tensorflow"):
        raise ringdl.UsageError(
            f"Keras uses {backend}, and ringdl.keras is for the backends torch, jax and "
            "tensorflow; set KERAS_BACKEND to one of them"
        )
    module = importlib.import_module(f"ringdl.keras._on_{backend}")
    named = [(_name(index, variable), variable) for index, variable in enumerate(variables)]
    if backend != "torch":  # whose buckets are agreed upon
        specs = [
            (name, tuple(variable.shape), dtype_name(variable))
            for (name, variable), gradient in zip(named, gradients, strict=True)
            if gradient is not None or backend != "jax"
        ]
        ranks = communicator_of(options.process_set)
        replicas.agree_with_root(specs, None, 0, ranks, "DistributedOptimizer")
    averaging: Averaging = module.BackendAveraging(named, options)
    return averaging


def dtype_name(variable: Any) -> str:
    """The name of a dtype: of Keras, or of TensorFlow."""
    return str(getattr(variable.dtype, "name", variable.dtype))


def _name(index: int, variable: Any) -> str:
    return f"variable {index} ({path_of(variable)})"


def path_of(variable: Any) -> str:
    """Without the numbers by which Keras counts layers: some ranks may have built more."""
    return re.sub(r"_\d+(?=_|/|:|$)", "", getattr(variable, "path", variable.name))

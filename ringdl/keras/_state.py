"""Equal replicas: broadcast the variables of a model and of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

import ringdl
from ringdl._engine import Kind
from ringdl._training import replicas
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set, root_in
from ringdl._training.replicas import Bytes
from ringdl._work import one_of_several_steps
from ringdl.keras._averaging import dtype_name


class VariableReplica:
    """A `Replica` of a variable."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._array = np.asarray(keras.ops.convert_to_numpy(variable), order="C")
        self.nbytes = self._array.nbytes

    def read(self) -> Bytes:
        """See `Replica`."""
        return self._array.reshape(-1).view(np.uint8)

    def write(self, elements: Bytes) -> None:
        """See `Replica`."""
        self._variable.assign(elements.view(self._array.dtype).reshape(self._array.shape))


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: AnySet = global_process_set
) -> None:
    """Overwrite variables with those of ``root_rank``. Collective.

    Args:
        variables: ``model.weights`` or ``model.optimizer.variables``, of models that are built: the
            same number, shapes and dtypes in the same order on all ranks.
        root_rank: whose values all ranks get.
        process_set: whose ranks; ``root_rank`` is one of them, by its number among all.

    Raises:
        UsageError: these are no variables; other ranks get a MismatchError.
        MismatchError: on every rank, if they differ; no variable has changed then.
    """
    communicator = communicator_of(process_set)
    with communicator._telling(Kind.broadcast, None):
        root_rank = root_in(process_set, root_rank)
        listed = list(variables) if isinstance(variables, Iterable) else [variables]
        if not all(hasattr(each, "assign") and hasattr(each, "numpy") for each in listed):
            raise ringdl.UsageError(
                "broadcast_variables takes variables of Keras: pass model.weights or "
                "model.optimizer.variables"
            )
    specs = [
        (f"variable {index}", tuple(variable.shape), dtype_name(variable))
        for index, variable in enumerate(listed)
    ]
    replicas.agree_with_root(specs, None, root_rank, communicator, "broadcast_variables")
    with one_of_several_steps():
        replicas.broadcast(map(VariableReplica, listed), root_rank, communicator)

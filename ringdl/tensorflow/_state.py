"""Equal replicas: variables and objects of one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import ringdl
from ringdl._engine import Kind
from ringdl._training import replicas
from ringdl._training.in_numpy import ArrayReplica
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set, root_in
from ringdl._work import one_of_several_steps
from ringdl.tensorflow._graph import Array, as_it_is, call


@as_it_is
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: AnySet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with those of ``root_rank``. Collective.

    In eager mode, in a ``tf.function`` (as in the first step, once the optimizer has its
    variables), or in a graph of TensorFlow 1, where it returns the operation.

    Args:
        variables: of TensorFlow or Keras: ``model.variables``, ``optimizer.variables``; the same
            number, shapes and dtypes in the same order on every rank.
        root_rank: whose values all ranks get.
        process_set: whose ranks; ``root_rank`` is one of them, by its number among all.
        inplace: accepted, but without effect.

    Raises:
        UsageError: these are no variables; other ranks get a MismatchError.
        MismatchError: on every rank, if they differ; no variable has changed then.
    """
    del inplace
    assigned = _assign(variables, root_rank, process_set)
    is_of_1 = not tf.executing_eagerly() and not tf.inside_function()
    return tf.group(assigned) if is_of_1 else None


@as_it_is
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> list[Any]:
    """Like `broadcast_variables`; returns the new values."""
    del name
    listed = [*variables]
    with tf.control_dependencies(_assign(listed, root_rank, process_set)):
        return [tf.identity(variable) for variable in listed]


def broadcast_global_variables(root_rank: int) -> Any:
    """`broadcast_variables` of all that a graph of TensorFlow 1 has.

    Raises:
        UsageError: in eager mode, where there is no such list.
    """
    if tf.executing_eagerly():
        raise ringdl.UsageError(
            "broadcast_global_variables() is for graphs of TensorFlow 1; call "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Any:
    """The picklable object of ``root_rank``; what other ranks pass is ignored."""
    del session
    communicator = communicator_of(process_set)
    return communicator.broadcast_object(obj, root_in(process_set, root_rank), name)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> list[Any]:
    """The picklable objects of all ranks, in their order."""
    del session
    return communicator_of(process_set).allgather_object(obj, name)


def _assign(variables: Iterable[Any], root_rank: int, process_set: AnySet) -> list[Any]:
    communicator = communicator_of(process_set)
    with communicator._telling(Kind.broadcast, None):
        listed = [*variables] if isinstance(variables, Iterable) else [variables]
        if not all(hasattr(variable, "assign") for variable in listed):
            raise ringdl.UsageError(
                "broadcast_variables takes variables: pass model.variables or optimizer.variables"
            )
    if not listed and not tf.executing_eagerly():  # an operation has to have results
        return []
    values = [tf.convert_to_tensor(variable) for variable in listed]

    def function(_: str | None, *arrays: Array) -> Sequence[Array]:
        return _of_root(arrays, root_rank, process_set)

    results = call("broadcast_variables", function, values, [value.dtype for value in values], None)
    for result, value in zip(results, values, strict=True):
        result.set_shape(value.shape)
    return [variable.assign(result) for variable, result in zip(listed, results, strict=True)]


def _of_root(arrays: Sequence[Array], root_rank: int, process_set: AnySet) -> list[Array]:
    communicator = communicator_of(process_set)
    with communicator._telling(Kind.broadcast, None):
        root = root_in(process_set, root_rank)
        if any(array.dtype == object for array in arrays):
            raise ringdl.UsageError("variables of strings are not broadcast; leave them out")
        copies = [np.array(array, order="C") for array in arrays]
    specs = [
        (f"variable {index}", array.shape, array.dtype.name) for index, array in enumerate(copies)
    ]
    replicas.agree_with_root(specs, None, root, communicator, "broadcast_variables")
    with one_of_several_steps():
        replicas.broadcast(map(ArrayReplica, copies), root, communicator)
    return copies

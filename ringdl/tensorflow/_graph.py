"""Functions of arrays that take the place of TensorFlow's operations.

In eager mode they are called at once. In a graph of a ``tf.function`` they become operations that
take turns, in the order of the program and so in the same one on all ranks: through branches,
loops, gradients, and functions that call others. Each is between two operations that write to one
variable. TensorFlow orders these, also through functions that are called. The graph of a gradient
whose tape is outside of the function is not ordered so: there each turn waits for whatever used
the variable's handle, and hands on a new name of the handle, which later branches and loops take.

A graph of TensorFlow 1 is not ordered at all. There each operation follows the one that was made
before it, so to run one of them runs all before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

import ringdl
from ringdl._engine import Kind
from ringdl._frameworks.tensorflow import tensor_over
from ringdl._submitters import for_caller
from ringdl._training.process_sets import AnySet, communicator_of

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[..., Sequence[Array | None]]

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_STATE = "_ringdl_turns"
"""The attribute of a graph with its `_Turns`, or with the last operations of TensorFlow 1."""


def key_of(kind: str, name: str | None) -> str | None:
    """What a call is matched by that its caller has named, or not."""
    return None if name is None else f"{kind}.{name}"


def given(tensors: Sequence[Any], kind: Kind, name: str | None, process_set: AnySet) -> list[Any]:
    """The arguments of a call as tensors.

    Raises:
        UsageError: there are no such ranks.
        Exception: TensorFlow's own, if one cannot be a tensor; the other ranks get a MismatchError.
    """
    with communicator_of(process_set)._telling(kind, key_of(kind.name, name)):
        return [tf.convert_to_tensor(tensor) for tensor in tensors]


def call(
    kind: str, function: Function, tensors: Sequence[Any], dtypes: Sequence[Any], name: str | None
) -> list[Any]:
    """What a function makes of the elements of tensors, now or whenever the graph runs.

    Args:
        kind: what it does, for names.
        function: takes the name that its collectives are matched by, or None where they are matched
            by their order, and arrays, which it must not write to. Returns new arrays, to which
            nobody writes later. In eager mode some may be None, and are so in the result.
        tensors: the arguments.
        dtypes: of the results.
        name: the name, if the caller has given one.

    Raises:
        UsageError: the function is being compiled by XLA.
    """
    key = key_of(kind, name)
    if tf.executing_eagerly():
        arrays = function(key, *(np.asarray(tensor) for tensor in tensors))
        return [None if array is None else tensor_over(array) for array in arrays]
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ringdl.UsageError(
            "inside of tf.function(jit_compile=True) nothing can be called that is not compiled; "
            "leave jit_compile out of the function that averages, and compile those it calls "
            "(Keras: model.compile(..., jit_compile=False))"
        )

    def run(*arrays: Any) -> Sequence[Array | None]:  # or numbers, of tensors without axes
        with for_caller(_has_one_caller()):
            return function(key, *map(np.asarray, arrays))

    operation = partial(tf.numpy_function, run, tensors, dtypes)
    with tf.init_scope():
        is_ordered = tf.executing_eagerly()
    if is_ordered:
        return _turns_of(graph).take(operation)
    with tf.control_dependencies(getattr(graph, _STATE, [])):
        results: list[Any] = operation()
    setattr(graph, _STATE, [result.op for result in results])
    return results


def _has_one_caller() -> bool:
    """Whether no other thread is there, which may be the caller as well."""
    each = (type(thread) for thread in threading.enumerate())
    return sum(kind is not threading._DummyThread for kind in each) == 1


def as_it_is(function: AnyFunction) -> AnyFunction:
    """Have AutoGraph leave a function alone."""
    left: AnyFunction = tf.autograph.experimental.do_not_convert(function)
    return left


class _Turns:
    """Who has had turns in one graph so far.

    Attributes:
        handle: of the variable, by its newest name.
    """

    handle: Any

    def __init__(self, graph: Any) -> None:
        is_branch = graph.is_control_flow_graph
        given = _turns_of(graph.outer_graph).handle if is_branch else _variable().handle
        self._first = self.handle = graph.capture(given)

    def take(self, operation: Callable[[], list[Any]]) -> list[Any]:
        users = {*self._first.consumers(), *self.handle.consumers()}
        with tf.control_dependencies(sorted(users, key=lambda user: user.name)):
            begin = self._write()
        with tf.control_dependencies([begin]):
            results = operation()
        with tf.control_dependencies(results):
            end = self._write()
        with tf.control_dependencies([end]):
            self.handle = tf.identity(self.handle)
        return results

    def _write(self) -> Any:
        return tf.raw_ops.AssignAddVariableOp(resource=self.handle, value=1)


@cache
def _variable() -> Any:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, name="ringdl_turns")


def _turns_of(graph: Any) -> _Turns:
    if not hasattr(graph, _STATE):
        setattr(graph, _STATE, _Turns(graph))
    turns: _Turns = getattr(graph, _STATE)
    return turns


def fact(of_rank: Callable[[], int], name: str | None = None) -> Any:
    """A number that ringdl knows, as a tensor of the time when it is used."""
    if tf.executing_eagerly():
        return tf.constant(of_rank(), tf.int32)
    number = tf.numpy_function(lambda: np.array(of_rank(), np.int32), [], tf.int32, name=name)
    return tf.ensure_shape(number, [])


def dense(tensors: Iterable[Any], dtypes: Iterable[Any]) -> list[Any]:
    """Gradients as TensorFlow passes them, as tensors of these dtypes."""
    return [
        tf.cast(tf.convert_to_tensor(tensor), dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]

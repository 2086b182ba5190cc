"""Exchanges of tensors, with the signatures of MPI training scripts.

They take tensors of any dtype but strings. ``name`` matches calls that ranks make in different
orders; ``ignore_name_scope`` has no effect. Roots are named by their number among all ranks, in
process sets, too; in a `ringdl.Communicator` by their number there.

All are differentiable, with the gradients that such scripts expect: that of an alltoall is the
alltoall back; those of an allgather and a broadcast are averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import ringdl
from ringdl import _arrays
from ringdl._engine import DType, Kind
from ringdl._training import joining
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set, root_in
from ringdl.tensorflow._graph import Array, as_it_is, call, dense, fact, given
from ringdl.tensorflow._reducing import reduce


@as_it_is
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnySet = global_process_set,
) -> Any:
    """The tensors of all ranks, joined along axis 0, where their lengths may differ."""
    del ignore_name_scope

    def function(key: str | None, array: Array) -> list[Array]:
        sent, received = _as_bits(array)
        return [received(communicator_of(process_set).allgather(sent, key))]

    def of_gradient(key: str | None, upstream: Array, like: Array) -> list[Array]:
        communicator = communicator_of(process_set)
        [average] = reduce([upstream], ringdl.Average, communicator, key)
        rows = like.shape[0] if like.ndim > 0 else 1
        counts = communicator.allgather(np.array([rows]), key)
        first = int(counts[: communicator.rank].sum())
        return [average[first : first + rows].reshape(like.shape)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gathered(tensor: Any) -> Any:
        [result] = call("allgather", function, [tensor], [tensor.dtype], name)
        if tensor.shape.rank is not None:
            result.set_shape([None, *tensor.shape[1:]])

        def gradient(upstream: Any) -> Any:
            [rows] = dense([upstream], [tensor.dtype])
            kind = "allgather.gradient"
            [own] = call(kind, of_gradient, [rows, tensor], [tensor.dtype], name)
            own.set_shape(tensor.shape)
            return own

        return result, gradient

    return gathered(*given([tensor], Kind.allgather, name, process_set))


@as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnySet = global_process_set,
) -> list[Any]:
    """`allgather` of each tensor."""
    return [
        allgather(tensor, name and f"{name}.{number}", ignore_name_scope, process_set)
        for number, tensor in enumerate(tensors)
    ]


@as_it_is
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnySet = global_process_set,
) -> Any:
    """The tensor of ``root_rank``."""
    del ignore_name_scope

    def function(key: str | None, array: Array) -> list[Array]:
        communicator = communicator_of(process_set)
        with communicator._telling(Kind.broadcast, key):
            root = root_in(process_set, root_rank)
            sent, received = _as_bits(array)
            _arrays.operand(sent, written=False)
        copy = communicator.empty(sent.shape, sent.dtype)
        if communicator.rank == root:
            np.copyto(copy, sent)
        return [received(communicator.broadcast_(copy, root, key)).reshape(array.shape)]

    def of_gradient(key: str | None, upstream: Array) -> list[Array]:
        communicator = communicator_of(process_set)
        [average] = reduce([upstream], ringdl.Average, communicator, key)
        if communicator.rank != root_in(process_set, root_rank):
            average[...] = 0
        return [average]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def sent(tensor: Any) -> Any:
        [result] = call("broadcast", function, [tensor], [tensor.dtype], name)
        result.set_shape(tensor.shape)

        def gradient(upstream: Any) -> Any:
            upstream = dense([upstream], [tensor.dtype])
            [own] = call("broadcast.gradient", of_gradient, upstream, [tensor.dtype], name)
            own.set_shape(tensor.shape)
            return own

        return result, gradient

    return sent(*given([tensor], Kind.broadcast, name, process_set))


@as_it_is
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: AnySet = global_process_set,
) -> Any:
    """Send each rank its rows, ``splits`` of them or as many as all others, and collect own ones.

    Returns:
        The rows from all ranks, in their order; if ``splits`` is given, also how many came from
        each.
    """
    del ignore_name_scope
    arguments = [tensor] if splits is None else [tensor, splits]
    sent, *dealt = given(arguments, Kind.alltoall, name, process_set)
    rows, received = _alltoall(sent, dealt, name, process_set)
    return rows if splits is None else (rows, received)


def _alltoall(
    tensor: Any, dealt: list[Any], name: str | None, process_set: AnySet
) -> tuple[Any, Any]:
    dtypes = [tensor.dtype, dealt[0].dtype if dealt else tf.int32]

    def function(key: str | None, array: Array, *dealt: Array) -> list[Array]:
        communicator = communicator_of(process_set)
        size = communicator.size
        splits: Any = dealt[0] if dealt else None
        if splits is None and array.ndim > 0 and array.shape[0] % size == 0:
            splits = [array.shape[0] // size] * size  # so that received rows are counted, too
        sent, received = _as_bits(array) if array.ndim > 0 else (array, None)
        rows, counts = communicator.alltoall(sent, splits, key)
        assert received is not None  # an array without axes was refused
        return [received(rows), np.array(counts, dtypes[1].as_numpy_dtype)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchanged(tensor: Any) -> Any:
        rows, counts = call("alltoall", function, [tensor, *dealt], dtypes, name)
        if tensor.shape.rank:
            rows.set_shape([None, *tensor.shape[1:]])
        counts.set_shape([None])

        def gradient(upstream: Any, _: Any) -> Any:
            [back] = dense([upstream], [tensor.dtype])
            own, _counts = _alltoall(back, [counts], gradient_name(name), process_set)
            return tf.ensure_shape(own, tensor.shape)

        return (rows, counts), gradient

    rows, counts = exchanged(tensor)
    return rows, counts


@as_it_is
def join() -> Any:
    """Wait until all ranks have called this: see `ringdl.torch.join`. The last one, as a tensor.

    Broadcast its variables then: nothing compares them afterwards.
    """
    [last] = call("join", lambda _: [np.array(joining.join(), np.int32)], [], [tf.int32], None)
    return tf.ensure_shape(last, [])


def ranks_as(dtype: Any, process_set: AnySet) -> Any:
    """How many ranks there are, as a tensor."""
    return tf.cast(fact(lambda: communicator_of(process_set).size), dtype)


def gradient_name(name: str | None) -> str | None:
    """What the collective of a gradient is called."""
    return None if name is None else f"{name}.gradient"


def _as_bits(array: Array) -> tuple[Array, Callable[[Array], Array]]:
    """An array that can travel, and what makes such a one, with other rows, one of this dtype.

    It is the array, or its bytes along another axis if its dtype is none of ringdl's. One without
    axes is a row then.
    """
    if array.dtype.name in DType.__members__ or array.dtype == object:
        return array, lambda received: received
    rows = array if array.ndim > 0 else array.reshape(1)
    as_bytes = np.ascontiguousarray(rows)[..., None].view(np.uint8)
    return as_bytes, lambda received: received.view(array.dtype)[..., 0]

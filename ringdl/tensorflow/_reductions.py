"""Reductions of tensors, with the signatures of MPI training scripts.

They take tensors, variables, and what can be made a tensor, in eager mode and in ``tf.function``;
`allreduce` and `grouped_allreduce` also ``tf.IndexedSlices``, whose rows are gathered. ``name``
matches calls that ranks make in different orders. ``average=False`` is the older way to say
``op=Sum``. ``prescale_factor`` and ``postscale_factor`` multiply before and after; integers are cut
towards zero then. ``device_dense``, ``device_sparse`` and ``ignore_name_scope`` have no effect.

All are differentiable, with the gradients that such scripts expect: that of an allreduce is the
same allreduce of the gradients; that of a reducescatter is the allgather of the gradients, for Sum
times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import ringdl
from ringdl._engine import Kind
from ringdl._reductions import Op
from ringdl._training.compression import AnyCompression, wire_of
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set
from ringdl.tensorflow._compression import Compression, Compressor
from ringdl.tensorflow._exchanges import allgather, gradient_name, ranks_as
from ringdl.tensorflow._graph import Array, as_it_is, call, dense, given, key_of
from ringdl.tensorflow._reducing import UNSCALED, Scales, reduce, scale
from ringdl.tensorflow._specs import Spec, agree


@as_it_is
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompression = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of ``tensor`` over all ranks (Average unless given).

    Raises:
        MismatchError: ranks differ; on every rank. Out of a ``tf.function`` it is TensorFlow's own
            error, whose text begins with the name.
        UsageError: not a tensor that can be reduced; likewise.
    """
    del device_dense, device_sparse, ignore_name_scope
    scales = (prescale_factor, postscale_factor)
    return _allreduce([tensor], average, op, name, compression, scales, process_set)[0]


@as_it_is
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompression = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of each tensor, in fewer messages."""
    del device_dense, device_sparse, ignore_name_scope
    scales = (prescale_factor, postscale_factor)
    return _allreduce(tensors, average, op, name, compression, scales, process_set)


@as_it_is
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: AnyCompression = Compression.none,
    op: Op = ringdl.Average,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over all ranks; this rank's rows of it, as evenly dealt as can be.

    With ``compression``, floats are rounded to that dtype before and after.
    """
    del device_dense, ignore_name_scope
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(tensor, op, name, compression, scales, process_set)


@as_it_is
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: AnyCompression = Compression.none,
    op: Op = ringdl.Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of each tensor."""
    del device_dense
    scales = (prescale_factor, postscale_factor)
    return [_reducescatter(each, op, None, compression, scales, process_set) for each in tensors]


def _allreduce(
    tensors: Sequence[Any],
    average: bool | None,
    op: Op | None,
    name: str | None,
    compression: AnyCompression,
    scales: Scales,
    process_set: AnySet,
) -> list[Any]:
    if average is not None and op is not None:
        raise ringdl.UsageError("give op or average, not both")
    if op is None:
        op = ringdl.Sum if average is False else ringdl.Average
    results = [
        _gathered(each, op, _numbered(name, index, tensors), scales, process_set)
        if isinstance(each, tf.IndexedSlices)
        else None
        for index, each in enumerate(tensors)
    ]
    dense_ones = [index for index, result in enumerate(results) if result is None]
    whole = given([tensors[index] for index in dense_ones], Kind.allreduce, name, process_set)
    reduced = reduce_all(whole, op, name, compression, scales, process_set)
    for index, result in zip(dense_ones, reduced, strict=True):
        results[index] = result
    return results


def reduce_all(
    tensors: Sequence[Any],
    op: Op,
    name: str | None = None,
    compression: AnyCompression = None,
    scales: Scales = UNSCALED,
    process_set: AnySet = global_process_set,
) -> list[Any]:
    """`grouped_allreduce` of dense tensors. See `ringdl.tensorflow._reducing.reduce`."""
    if not tensors:
        return []
    dtypes = [tensor.dtype for tensor in tensors]

    def function(key: str | None, *arrays: Array) -> list[Array]:
        communicator = communicator_of(process_set)
        if len(arrays) > 1:
            its = [Spec(x.shape, x.dtype.name, f"tensor {i}") for i, x in enumerate(arrays)]
            agree(its, communicator, key, "the tensors of a grouped_allreduce")
        return reduce(arrays, op, communicator, key, compression, scales)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(*tensors: Any) -> Any:
        results = call("allreduce", function, tensors, dtypes, name)
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)

        def gradient(*upstream: Any) -> list[Any]:
            _refuse_gradient(op)
            its_name = gradient_name(name)
            return reduce_all(
                dense(upstream, dtypes), op, its_name, compression, scales, process_set
            )

        return results, gradient

    results: list[Any] = [*reduced(*tensors)]
    return results


def _reducescatter(
    tensor: Any,
    op: Op,
    name: str | None,
    compression: AnyCompression,
    scales: Scales,
    process_set: AnySet,
) -> Any:
    [tensor] = given([tensor], Kind.reducescatter, name, process_set)
    with communicator_of(process_set)._telling(Kind.reducescatter, key_of("reducescatter", name)):
        compressor = Compressor(wire_of(compression) or "none")
    narrow, wide = compressor.compress(tensor)
    before, after = scales

    def function(key: str | None, array: Array) -> list[Array]:
        if before != 1.0:
            given, array = array, np.empty_like(array)
            scale(given, before, array)
        rows = communicator_of(process_set).reducescatter(array, op, key)
        if after != 1.0:
            scale(rows, after, rows)
        return [rows]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(tensor: Any) -> Any:
        [result] = call("reducescatter", function, [tensor], [tensor.dtype], name)
        if tensor.shape.rank:
            result.set_shape([None, *tensor.shape[1:]])

        def gradient(upstream: Any) -> Any:
            _refuse_gradient(op)
            [rows] = dense([upstream], [tensor.dtype])
            rows *= tf.cast(before * after, tensor.dtype)
            if op is ringdl.Sum:
                rows *= ranks_as(tensor.dtype, process_set)
            return allgather(rows, gradient_name(name), process_set=process_set)

        return result, gradient

    return compressor.decompress(reduced(narrow), wide)


def _numbered(name: str | None, index: int, tensors: Sequence[Any]) -> str | None:
    return name if name is None or len(tensors) == 1 else f"{name}.{index}"


def _gathered(slices: Any, op: Op, name: str | None, scales: Scales, process_set: AnySet) -> Any:
    """The sum of slices as the rows of all ranks, where an index may occur several times."""
    if op not in (ringdl.Sum, ringdl.Average) or scales != UNSCALED:
        raise NotImplementedError(
            "tf.IndexedSlices are reduced with Sum or Average, and not scaled; make them a tensor "
            "first: tf.convert_to_tensor(slices), or sparse_as_dense=True"
        )
    names = [None if name is None else f"{name}.{part}" for part in ("values", "indices")]
    values = allgather(slices.values, names[0], process_set=process_set)
    indices = allgather(slices.indices, names[1], process_set=process_set)
    if op == ringdl.Average:
        values /= ranks_as(values.dtype, process_set)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _refuse_gradient(op: Op) -> None:
    if op not in (ringdl.Average, ringdl.Sum):
        raise ringdl.UsageError(
            f"a reduction by {op} has no gradient here; reduce what tf.stop_gradient returns, or "
            "by Sum or Average"
        )

"""Gradients that are averaged together: agreed upon first, and whole where some are missing."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import ringdl
from ringdl._engine import Kind
from ringdl._reductions import Op
from ringdl._training import replicas
from ringdl._training.compression import AnyCompression
from ringdl._training.in_numpy import ArrayReplica
from ringdl._training.process_sets import AnySet, communicator_of
from ringdl._work import one_of_several_steps
from ringdl.tensorflow._graph import Array, call, dense
from ringdl.tensorflow._reducing import reduce
from ringdl.tensorflow._reductions import reduce_all
from ringdl.tensorflow._specs import Spec, agree

_NAME = "gradients (DistributedGradientTape, DistributedOptimizer)"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_HOW_TO_MEND = (
    "call ringdl.tensorflow.broadcast_variables(variables, root_rank=0) before the first step or "
    "directly after it, or, if they are meant to differ, set RINGDL_CHECK_REPLICAS=0"
)
_COMPARED_CALL = 10
"""Which call compares replicas that nobody has broadcast: scripts broadcast within the first step,
and may take several gradients in it."""


@dataclass(frozen=True)
class Options:
    """What a tape was told, or an optimizer. See `DistributedGradientTape`.

    Attributes:
        compares: whether replicas are compared that nobody has broadcast.
    """

    op: Op
    compression: AnyCompression
    sparse_as_dense: bool
    predivisor: float
    process_set: AnySet
    scale_local: bool
    compares: bool = True


def average(sources: list[Any], gradients: list[Any], options: Options) -> list[Any]:
    """Averages in place of gradients, of which some may be None. Collective.

    Raises:
        UsageError: see `DistributedGradientTape`, as for the other errors.
        MismatchError: likewise.
    """
    if options.sparse_as_dense:
        gradients = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
    specs = [_spec(index, *pair) for index, pair in enumerate(zip(sources, gradients, strict=True))]
    results = [*gradients]
    whole = [i for i, each in enumerate(gradients) if each is not None and not specs[i].is_sparse]
    sparse = [index for index, spec in enumerate(specs) if spec.is_sparse]
    missing = [index for index, each in enumerate(gradients) if each is None]
    is_eager = tf.executing_eagerly()
    rows = [part for i in sparse for part in (gradients[i].values, gradients[i].indices)]
    # TensorFlow keeps the function for good, and what it refers to.
    variables = {
        index: weakref.ref(source)
        for index, source in enumerate(sources if options.compares else [])
        if _is_variable(source)
    }

    def function(key: str | None, *arrays: Array) -> list[Array | None]:
        its_rows = arrays[len(whole) :]
        its_whole = dict(zip(whole, arrays, strict=False))
        averages, gathered = _averaged(
            specs, its_whole, its_rows, variables, options, key, fills=is_eager
        )
        filled = missing if is_eager else []
        found = [*map(averages.get, whole), *gathered, *map(averages.get, filled)]
        return found or [np.zeros((), np.int32)]

    def exchanged(tensors: Sequence[Any]) -> list[Any]:
        inputs = [*tensors, *rows]
        dtypes = [each.dtype for each in inputs] or [tf.int32]  # an operation has results
        found = call("gradients", function, inputs, dtypes, None)
        for result, tensor in zip(found, tensors, strict=False):
            result.set_shape(tensor.shape)
        of_rows = found[len(tensors) : len(inputs)]
        for index, values, indices in zip(sparse, of_rows[::2], of_rows[1::2], strict=True):
            values.set_shape([None, *gradients[index].values.shape[1:]])
            indices.set_shape([None])
            results[index] = tf.IndexedSlices(values, indices, gradients[index].dense_shape)
        for index, result in zip(missing if is_eager else [], found[len(inputs) :], strict=False):
            results[index] = result
        return found[: len(tensors)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def averaged(*tensors: Any) -> Any:
        def gradient(*upstream: Any) -> list[Any]:
            its = dense(upstream, [tensor.dtype for tensor in tensors])
            return reduce_all(its, options.op, process_set=options.process_set)

        return exchanged(tensors), gradient

    tensors = [gradients[index] for index in whole]
    for index, result in zip(whole, averaged(*tensors) if tensors else exchanged([]), strict=True):
        results[index] = result
    return results


def _spec(index: int, source: Any, gradient: Any) -> Spec:
    shape = tf.TensorShape(source.shape)
    dtype = tf.as_dtype(source.dtype if gradient is None else gradient.dtype)
    return Spec(
        tuple(shape) if shape.rank is not None else None,
        dtype.name,
        f"gradient {index} ({_name(source)})",
        isinstance(gradient, tf.IndexedSlices),
        gradient is None,
    )


def _zeros(spec: Spec) -> Array:
    return np.zeros(spec.shape or (), tf.as_dtype(spec.dtype).as_numpy_dtype)


def _averaged(
    specs: Sequence[Spec],
    whole: Mapping[int, Array],
    rows: Sequence[Array],
    variables: Mapping[int, weakref.ref[Any]],
    options: Options,
    key: str | None,
    *,
    fills: bool,
) -> tuple[dict[int, Array], list[Array]]:
    """The averages that some rank has given, by index, and the sparse ones' values and indices.

    Args:
        specs: of all gradients.
        whole: those that are dense, by index.
        rows: values and indices of the others in turns.
        variables: those that may be compared, by index.
        options: of the tape.
        key: what the collectives are matched by; by default a name of their own.
        fills: whether gradients that only others have are zeros here; else they are an error.
    """
    communicator, key = communicator_of(options.process_set), key or _NAME
    with communicator._telling(Kind.allreduce, key):
        for spec in specs:
            if spec.dtype not in _FLOATS:
                raise ringdl.UsageError(
                    f"the {spec.name} has dtype {spec.dtype}; gradients are float64, float32, "
                    "float16 or bfloat16 (leave other sources out)"
                )
            if spec.is_sparse and options.op not in (ringdl.Sum, ringdl.Average):
                raise ringdl.UsageError(
                    f"the {spec.name} is tf.IndexedSlices, which are reduced with Sum or Average; "
                    "pass sparse_as_dense=True"
                )
    lacking = sum(not spec.is_sparse for spec in specs) - len(whole)
    compares = _is_to_be_compared(variables, communicator)
    with one_of_several_steps():
        totals = agree(specs, communicator, key, key, lacking, compares=compares)
        if totals.lacking:
            whole = _completed(specs, whole, totals.ranks, communicator, key, fills=fills)
        if totals.comparing and totals.ranks == communicator.size:  # none has joined
            # Rows of sparse ones are added up in any order: their bits may differ by now.
            compared = [variables[index]() for index in whole if index in variables]
            named = [(_name(variable), ArrayReplica(_read(variable))) for variable in compared]
            replicas.check(named, communicator, f"{key} (replicas)", _HOW_TO_MEND)
        gathered = [communicator.allgather_async(each, f"{key} (rows)") for each in rows]
        scales = (1 / options.predivisor, options.predivisor)
        averages = reduce(
            [*whole.values()], options.op, communicator, key, options.compression, scales
        )
        parts = [work.wait() for work in gathered]
    for values in parts[::2] if options.op == ringdl.Average else []:
        np.divide(values, communicator.size, out=values, casting="unsafe")
    return dict(zip(whole, averages, strict=True)), parts


def _is_variable(source: Any) -> bool:
    """Whether it has a value whenever a step is made."""
    return tf.is_tensor(handle := getattr(source, "handle", None)) and hasattr(handle, "numpy")


def _name(source: Any) -> str:
    return str(getattr(source, "path", None) or getattr(source, "name", "a tensor"))


def _read(variable: Any) -> Array:
    """The value, which no tape hears of."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return np.asarray(value)


def _is_to_be_compared(
    variables: Mapping[int, weakref.ref[Any]], communicator: ringdl.Communicator
) -> bool:
    """Whether it is time to look for replicas that differ, as nobody has broadcast any; counts."""
    first = next((variable() for variable in variables.values()), None)
    if first is None or not tf.executing_eagerly():  # a graph of TensorFlow 1
        return False
    calls: Counter[Any] = vars(first).setdefault("_ringdl_calls", Counter())
    those = (communicator._id(), communicator.epoch, *map(id, variables.values()))
    calls[those] += 1
    return calls[those] == _COMPARED_CALL and not replicas.were_broadcast(communicator)


def _completed(
    specs: Sequence[Spec],
    whole: Mapping[int, Array],
    count: int,
    communicator: ringdl.Communicator,
    key: str,
    *,
    fills: bool,
) -> dict[int, Array]:
    """The gradients with zeros for those that only others have, of `count` ranks. Collective."""
    has = np.array([index in whole for index in range(len(specs))], np.int64)
    counts = communicator.allreduce_(has, ringdl.Sum, f"{key} (missing)").tolist()
    partly = [index for index, its_count in enumerate(counts) if 0 < its_count < count]
    if partly and not fills:
        raise ringdl.MismatchError(
            f"the {specs[partly[0]].name} is None on {count - counts[partly[0]]} of {count} ranks, "
            "and a tf.function cannot make a tensor of None; take the same sources on all ranks, "
            "or call gradient() outside of tf.function"
        )
    return {
        index: whole[index] if index in whole else _zeros(spec)
        for index, spec in enumerate(specs)
        if counts[index] > 0
    }

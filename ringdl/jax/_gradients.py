"""Averaged gradients: a transformation for optax, and functions like JAX's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import ringdl
from ringdl import _engine
from ringdl._engine import DType, Kind, Reduction
from ringdl._errors import UsageError
from ringdl._reductions import wire_dtype
from ringdl._training.compression import AnyCompression, wire_of
from ringdl._training.options import check_reduction
from ringdl.jax._buckets import reduce_bucket
from ringdl.jax._collectives import gathered, is_traced, spread
from ringdl.jax._plan import BUCKET_BYTES, Options, Spec, plan_of
from ringdl.jax._ranks import Ranks, ranks_of, telling

if TYPE_CHECKING:
    import optax

_FIRST_WORK = "gradients (0)"
"""The name of the first one of a call, in csrc/binding/xla_gradients.cc."""

users = itertools.count(1)
"""Numbers of transformations: what this rank alone tells them apart by."""

Leaves = list[tuple[str, Any]]
"""Of a tree, with their places in it."""


def average_gradients(
    op: Reduction = Reduction.Average,
    bucket_bytes: int = BUCKET_BYTES,
    communicator: ringdl.Communicator | None = None,
    compression: AnyCompression = None,
) -> optax.GradientTransformation:
    """A transformation that averages gradients over all ranks, before the optimizer's own.

    Gradients of one dtype are fused into buckets, in the order of the tree; each is one call. If
    ``update`` is given the parameters, its first step, and the first one after each `ringdl.init`,
    compares those of all ranks; RINGDL_CHECK_REPLICAS=0: none does.

    Args:
        op: Average, or Sum.
        bucket_bytes: a bucket is closed once it holds this many bytes.
        communicator: by default the one of `ringdl.init`.
        compression: "float16" or "bfloat16": what float32 travels as between hosts.

    Raises:
        UsageError: an argument is wrong; or, from ``update``, a gradient is no floating-point one:
            the other ranks' calls raise a MismatchError then.
        MismatchError: from ``update``, on every rank: gradients differ in names, shapes or dtypes,
            or parameters in their values. See `ringdl.jax.allreduce`.

    Example:
        >>> optimizer = optax.chain(ringdl.jax.average_gradients(), optax.adam(1e-3))
        >>> updates, state = optimizer.update(gradients, state, params)
    """
    import optax

    options = _options(op, bucket_bytes, compression)
    # One that is made while a function is traced may be made again on some ranks alone.
    user = 0 if is_traced(None) else next(users)

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return reduce_tree(updates, params, ranks_of(communicator), options, user), state

    return optax.GradientTransformation(init, update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: Reduction = Reduction.Average,
    bucket_bytes: int = BUCKET_BYTES,
    communicator: ringdl.Communicator | None = None,
    compression: AnyCompression = None,
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad``, with the value and the gradients averaged over all ranks.

    For loops without `average_gradients`; inside of compiled functions and outside. The value is
    reduced along with the gradients, by no further call. What `fun` returns beside it stays this
    rank's. The parameters of all ranks are compared once after `ringdl.init` for each tree of other
    names, shapes or dtypes.

    Args:
        fun: a loss of this rank's part of the batch.
        argnums: the arguments to differentiate by: parameters, the same on all ranks.
        has_aux: whether `fun` returns a pair, of the loss and of anything else.
        op: as in `average_gradients`, and also of the value.
        bucket_bytes: as there.
        communicator: as there.
        compression: as there; of the value, too.

    Raises:
        UsageError: as `average_gradients`; so are errors of `fun` told to the other ranks.
        MismatchError: as there.

    Example:
        >>> loss, gradients = ringdl.jax.value_and_grad(loss_of)(params, inputs, targets)
    """
    options = _options(op, bucket_bytes, compression)
    differentiated = jax.value_and_grad(fun, argnums, has_aux)

    @wraps(fun)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        ranks = ranks_of(communicator)
        with telling(ranks, Kind.allreduce, _FIRST_WORK):
            result, gradients = differentiated(*args, **kwargs)
            value, *aux = result if has_aux else (result,)
            named, structure = flat(gradients)
            by = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
            parameters, _ = flat(by)
        value, *averages = _reduced([("the value", value), *named], parameters, ranks, options)
        gradients = jax.tree.unflatten(structure, averages)
        return ((value, *aux) if has_aux else value), gradients

    return averaged


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: Reduction = Reduction.Average,
    bucket_bytes: int = BUCKET_BYTES,
    communicator: ringdl.Communicator | None = None,
    compression: AnyCompression = None,
) -> Callable[..., Any]:
    """Like ``jax.grad``, with gradients that are averaged over all ranks. See `value_and_grad`."""
    how: Any = {"op": op, "bucket_bytes": bucket_bytes, "communicator": communicator}
    both = value_and_grad(fun, argnums, has_aux, compression=compression, **how)

    @wraps(fun)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return averaged


def reduce_tree(
    gradients: Any,
    parameters: Any,
    ranks: Ranks,
    options: Options,
    user: int = 0,
) -> Any:
    """A tree of gradients, averaged or summed. Collective.

    Args:
        gradients: the tree.
        parameters: those that the first step compares; None if it does not.
        ranks: whose.
        options: see `average_gradients`.
        user: one of `users`, whose first step compares them; 0: the first one with such a tree.

    Raises:
        UsageError, MismatchError: see `average_gradients`.
    """
    named, structure = flat(gradients)
    results = _reduced(named, flat(parameters)[0], ranks, options, user)
    return jax.tree.unflatten(structure, results)


def _options(op: Any, bucket_bytes: Any, compression: AnyCompression) -> Options:
    """What `average_gradients` was told."""
    check_reduction(op, predivisor=1.0)
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes!r}; pass a positive number of bytes")
    return Options(op, bucket_bytes, wire_dtype(wire_of(compression)))


def flat(tree: Any) -> tuple[Leaves, Any]:
    """The leaves of a tree with their places in it, and its structure."""
    found, structure = jax.tree.flatten_with_path(tree)
    return [(jax.tree_util.keystr(path) or "the only one", leaf) for path, leaf in found], structure


def _reduced(
    gradients: Leaves,
    parameters: Leaves,
    ranks: Ranks,
    options: Options,
    user: int = 0,
) -> list[Any]:
    if ranks.communicator.size == 1 or not ranks.communicator._shared.checks_replicas:
        parameters = []
    with telling(ranks, Kind.allreduce, _FIRST_WORK):
        specs = [_spec(name, leaf) for name, leaf in gradients]
    compared = [(name, leaf) for name, leaf in parameters if _is_array(leaf)]
    names = tuple(name for name, _ in compared)
    plan = plan_of(tuple(specs), names, options, user)
    is_outside = not any(is_traced(leaf) for _, leaf in gradients + compared)
    whole = gathered if is_outside else jnp.asarray
    rest = [whole(leaf) for _, leaf in compared]
    results: list[Any] = [None] * len(gradients)
    for number, bucket in enumerate(_buckets(specs, options.bucket_bytes)):
        arrays = [whole(gradients[i][1]) for i in bucket] or [jnp.zeros(0, jnp.float32)]
        averages = reduce_bucket(arrays, rest, plan, number, ranks)
        for i, average in zip(bucket, averages, strict=False):
            results[i] = spread(average, gradients[i][1]) if is_outside else average
        rest = []
    return results


def _buckets(specs: list[Spec], bucket_bytes: int) -> list[list[int]]:
    """Of the numbers of gradients; an empty one where there are none, so that ranks meet."""
    none: list[int] = []
    sizes = [(name, list(shape), DType[dtype], none) for name, shape, dtype in specs]
    return _engine.plan_buckets(sizes, bucket_bytes, bucket_bytes) or [[]]


def _spec(name: str, leaf: Any) -> Spec:
    dtype = jnp.result_type(leaf)
    if dtype.name not in DType.__members__ or not jnp.issubdtype(dtype, jnp.floating):
        raise UsageError(
            f"the gradient {name} has dtype {dtype.name}; gradients are float64, float32, "
            "float16 or bfloat16 (leave others out by optax.masked)"
        )
    return name, jnp.shape(leaf), dtype.name


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and leaf.dtype.name in DType.__members__

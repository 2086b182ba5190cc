"""Averaged gradients: a transformation for optax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import ringdl
from ringdl import _engine
from ringdl._engine import DType, Reduction
from ringdl._errors import UsageError
from ringdl.jax._primitive import ranks_of, reduce_all

if TYPE_CHECKING:
    import optax


def average_gradients(
    op: Reduction = Reduction.Average,
    bucket_bytes: int = 25 << 20,
    communicator: ringdl.Communicator | None = None,
) -> optax.GradientTransformation:
    """A transformation that averages gradients over all ranks, before the optimizer's own.

    Gradients of one dtype are fused into buckets, in the order of the tree; each is one call.

    Args:
        op: Average, or Sum.
        bucket_bytes: a bucket is closed once it holds this many bytes.
        communicator: by default the one of `ringdl.init`.

    Raises:
        UsageError: `op` is none of these; or, from ``update``, a gradient is no floating-point one.

    Example:
        >>> optimizer = optax.chain(ringdl.jax.average_gradients(), optax.adam(1e-3))
    """
    import optax

    if op not in (Reduction.Average, Reduction.Sum):
        raise UsageError(f"gradients are reduced by Average or Sum, not by {op!r}")

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return _averaged(updates, op, bucket_bytes, communicator), state

    return optax.GradientTransformation(init, update)


def _averaged(
    tree: Any, op: Reduction, bucket_bytes: int, communicator: ringdl.Communicator | None
) -> Any:
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    results: list[Any] = [None] * len(named)
    ranks = ranks_of(communicator)
    specs: list[tuple[str, list[int], DType, list[int]]] = []
    for path, leaf in named:
        name, dtype = jax.tree_util.keystr(path), jnp.result_type(leaf)
        if dtype.name not in DType.__members__ or not jnp.issubdtype(dtype, jnp.floating):
            raise UsageError(
                f"the gradient {name} has dtype {dtype.name}; gradients are float64, float32, "
                "float16 or bfloat16 (leave others out by optax.masked)"
            )
        specs.append((name, list(jnp.shape(leaf)), DType[dtype.name], []))
    for bucket in _engine.plan_buckets(specs, bucket_bytes, bucket_bytes):
        arrays = [jnp.asarray(named[i][1]) for i in bucket]
        for i, average in zip(bucket, reduce_all(arrays, ranks, op), strict=True):
            results[i] = average
    return jax.tree_util.tree_unflatten(structure, results)

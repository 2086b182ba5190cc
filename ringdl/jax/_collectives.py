"""Collectives of JAX's arrays: inside of compiled functions by XLA, outside as `ringdl`'s own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import trace_state_clean

import ringdl
from ringdl._engine import Kind, Reduction
from ringdl.jax._primitive import collect, reduction_of
from ringdl.jax._ranks import ranks_of


def allreduce(
    x: Any, op: Reduction = Reduction.Average, communicator: ringdl.Communicator | None = None
) -> jax.Array:
    """Reduce an array over all ranks; every rank gets the same bits.

    The gradient of a sum is the sum of all ranks' gradients, that of an average their average.

    Inside of ``jax.shard_map`` over local devices, each device calls for itself, together with the
    same device of the other ranks. Outside of compiled functions an array may be spread over them.

    Args:
        x: an array, the same shape and dtype on all ranks.
        op: Average (default), Sum, Min, Max or Product; BitAnd, BitOr or BitXor.
        communicator: by default the one of `ringdl.init`.

    Raises:
        UsageError: not an array that can be reduced, or before `ringdl.init`; the calls of the
            other ranks raise a MismatchError.
        MismatchError: ranks differ; on every rank. Out of a compiled function it is JAX's own error
            (JaxRuntimeError), whose text begins with the name.
    """
    return _call(x, Kind.allreduce, communicator, op)


def allgather(x: Any, communicator: ringdl.Communicator | None = None) -> jax.Array:
    """Collect the rows (axis 0) of all ranks, in rank order. See `allreduce`.

    Inside of a compiled function all ranks pass the same shape.
    """
    return _call(x, Kind.allgather, communicator)


def broadcast(x: Any, root: int = 0, communicator: ringdl.Communicator | None = None) -> jax.Array:
    """The array of rank `root`, on all ranks. See `allreduce`."""
    return _call(x, Kind.broadcast, communicator, root=root)


def reducescatter(
    x: Any, op: Reduction = Reduction.Average, communicator: ringdl.Communicator | None = None
) -> jax.Array:
    """Reduce, and give each rank its part of the rows; earlier ranks take the remainder.

    See `allreduce`.
    """
    return _call(x, Kind.reducescatter, communicator, op)


def alltoall(x: Any, communicator: ringdl.Communicator | None = None) -> jax.Array:
    """Give each rank as many of the rows, and get as many from each. See `allreduce`."""
    return _call(x, Kind.alltoall, communicator)


def _call(
    x: Any,
    kind: Kind,
    communicator: ringdl.Communicator | None,
    op: Reduction | None = None,
    root: int | None = None,
) -> jax.Array:
    ranks = ranks_of(communicator)
    if is_traced(x):
        return collect(x, kind, ranks, Reduction.Sum if op is None else op, root)
    its = ranks.communicator
    with its._telling(kind, None):
        whole = gathered(x)
        further: list[Any] = [] if op is None else [reduction_of(op)]
    further += [] if root is None else [root]
    return spread(getattr(its, kind.name)(whole, *further), x)


def is_traced(x: Any) -> bool:
    """Whether a function is being compiled, differentiated or vectorized."""
    return isinstance(x, jax.core.Tracer) or not trace_state_clean()


def gathered(x: Any) -> jax.Array:
    """An array; if it is spread over several devices, on the first of them."""
    whole: jax.Array = jnp.asarray(x)
    devices = whole.devices()
    if len(devices) > 1:
        whole = jax.device_put(whole, min(devices, key=lambda device: int(device.id)))
    return whole


def spread(result: jax.Array, x: Any) -> jax.Array:
    """What became of an array that was gathered, where it was; if it has its shape still."""
    if isinstance(x, jax.Array) and len(x.devices()) > 1 and result.shape == x.shape:
        result = jax.device_put(result, x.sharding)
    return result

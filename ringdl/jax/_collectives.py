"""Collectives of JAX's arrays: inside of compiled functions by XLA, outside as `ringdl`'s own."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import trace_state_clean

import ringdl
from ringdl._engine import Kind, Reduction
from ringdl._errors import UsageError
from ringdl.jax._primitive import collect, ranks_of


def _is_traced(x: Any) -> bool:
    """Whether a function is being compiled, differentiated or vectorized."""
    return isinstance(x, jax.core.Tracer) or not trace_state_clean()


def _communicator(given: ringdl.Communicator | None) -> ringdl.Communicator:
    return ranks_of(given).communicator


def _reduction(op: Any) -> Reduction:
    if not isinstance(op, Reduction):
        raise UsageError(f"ringdl.jax reduces by ringdl's own reductions, not by {op!r}")
    return op


def _rank(root: Any) -> int:
    try:
        return operator.index(root)
    except TypeError:
        raise UsageError(
            f"root is {root!r}; pass the number of a rank, known when compiling"
        ) from None


def allreduce(
    x: Any, op: Reduction = Reduction.Average, communicator: ringdl.Communicator | None = None
) -> jax.Array:
    """Reduce an array over all ranks; every rank gets the same bits.

    The gradient of a sum is the sum of all ranks' gradients, that of an average their average.

    Args:
        x: an array, the same shape and dtype on all ranks.
        op: Average (default), Sum, Min, Max or Product; BitAnd, BitOr or BitXor.
        communicator: by default the one of `ringdl.init`.

    Raises:
        UsageError: not an array that can be reduced, or before `ringdl.init`.
        MismatchError: ranks differ; on every rank. Out of a compiled function it is JAX's own error
            (JaxRuntimeError), whose text begins with the name.
    """
    op = _reduction(op)
    if _is_traced(x):
        return collect(x, Kind.allreduce, ranks_of(communicator), op)
    result: jax.Array = _communicator(communicator).allreduce(jnp.asarray(x), op)
    return result


def allgather(x: Any, communicator: ringdl.Communicator | None = None) -> jax.Array:
    """Collect the rows (axis 0) of all ranks, in rank order. See `allreduce`.

    Inside of a compiled function all ranks pass the same shape.
    """
    if _is_traced(x):
        return collect(x, Kind.allgather, ranks_of(communicator))
    result: jax.Array = _communicator(communicator).allgather(jnp.asarray(x))
    return result


def broadcast(x: Any, root: int = 0, communicator: ringdl.Communicator | None = None) -> jax.Array:
    """The array of rank `root`, on all ranks. See `allreduce`."""
    if _is_traced(x):
        return collect(x, Kind.broadcast, ranks_of(communicator), root=_rank(root))
    result: jax.Array = _communicator(communicator).broadcast(jnp.asarray(x), root)
    return result


def reducescatter(
    x: Any, op: Reduction = Reduction.Average, communicator: ringdl.Communicator | None = None
) -> jax.Array:
    """Reduce, and give each rank its part of the rows; earlier ranks take the remainder.

    See `allreduce`.
    """
    op = _reduction(op)
    if _is_traced(x):
        return collect(x, Kind.reducescatter, ranks_of(communicator), op)
    result: jax.Array = _communicator(communicator).reducescatter(jnp.asarray(x), op)
    return result


def alltoall(x: Any, communicator: ringdl.Communicator | None = None) -> jax.Array:
    """Give each rank as many of the rows, and get as many from each. See `allreduce`."""
    if _is_traced(x):
        return collect(x, Kind.alltoall, ranks_of(communicator))
    result: jax.Array = _communicator(communicator).alltoall(jnp.asarray(x))
    return result

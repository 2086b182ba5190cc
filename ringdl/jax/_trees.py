"""Collectives of trees of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringdl
from ringdl._engine import DType
from ringdl._errors import UsageError
from ringdl.jax._primitive import ranks_of


def broadcast_variables(
    tree: Any, root: int = 0, communicator: ringdl.Communicator | None = None
) -> Any:
    """A tree with the arrays of rank `root`: parameters, or an optimizer's state.

    Call it outside of compiled functions, before the first step.

    Args:
        tree: any pytree, of the same structure on all ranks: arrays of JAX and NumPy, keys of
            `jax.random`; what is neither stays as it is.
        root: whose arrays they are to be.
        communicator: by default the one of `ringdl.init`.

    Raises:
        MismatchError: shapes or dtypes differ; on every rank.
    """
    its = ranks_of(communicator).communicator
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise UsageError("broadcast_variables is for outside of compiled functions; see broadcast")
    leaves, structure = jax.tree.flatten(tree)
    works = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray):
            works[index] = its.broadcast_async(_sendable(leaf), root)
    for index, work in works.items():
        leaves[index] = _as_it_was(work.wait(), leaves[index])
    return jax.tree.unflatten(structure, leaves)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _sendable(leaf: Any) -> Any:
    """The same bits as an array that ranks can send: of a dtype that they know, or bytes."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype.name in DType.__members__:
        return leaf
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def _as_it_was(sent: Any, leaf: Any) -> Any:
    like = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if sent.dtype != like.dtype:
        sent = np.asarray(sent).view(like.dtype).reshape(like.shape)
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(sent), impl=jax.random.key_impl(leaf))
    return sent if isinstance(leaf, np.ndarray) else jnp.asarray(sent)

"""Trees of arrays that are made equal on all ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringdl
from ringdl._engine import Kind
from ringdl._errors import UsageError
from ringdl._training import replicas
from ringdl._training.replicas import Bytes
from ringdl.jax._ranks import ranks_of


def broadcast_variables(
    tree: Any, root: int = 0, communicator: ringdl.Communicator | None = None
) -> Any:
    """A tree with the arrays of rank `root`: parameters, a model, or an optimizer's state.

    Call it outside of compiled functions, before the first step. Collective.

    Args:
        tree: any pytree, of the same structure on all ranks, as a state or module of flax.nnx or a
            module of equinox: arrays of JAX and NumPy, keys of `jax.random`; what is neither stays
            as it is.
        root: whose arrays they are to be.
        communicator: by default the one of `ringdl.init`.

    Returns:
        Another tree, with arrays where the given ones are: on the same devices.

    Raises:
        MismatchError: arrays differ in names, shapes or dtypes, or some rank has lost one; on every
            rank.
        UsageError: inside of a compiled function, or there is no such rank.
    """
    its = ranks_of(communicator).communicator
    with its._telling(Kind.broadcast, None):
        named, structure = jax.tree.flatten_with_path(tree)
        leaves = [leaf for _, leaf in named]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UsageError(
                "broadcast_variables is for outside of compiled functions; see broadcast"
            )
        found: dict[str, _Leaf] = {}
        unfit = None
        for index, (path, leaf) in enumerate(named):
            if isinstance(leaf, jax.Array | np.ndarray):
                name = jax.tree_util.keystr(path)
                unfit = unfit or _why_unfit(name, leaf, its.rank)
                found[name] = _Leaf(index, leaf)
    specs = [(name, its_leaf.shape, its_leaf.dtype) for name, its_leaf in found.items()]
    names = replicas.agree_with_root(specs, unfit, root, its, "broadcast_variables")
    replicas.broadcast((found[name] for name in names), root, its)
    for each in found.values():
        leaves[each.index] = each.result()
    return jax.tree.unflatten(structure, leaves)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _why_unfit(name: str, leaf: Any, rank: int) -> str | None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return f"{name} was deleted or donated on rank {rank}; pass what the last step returned"
    if leaf.dtype == object:
        return f"{name} holds objects on rank {rank}; leave it out, or see broadcast_object"
    return None


class _Leaf:
    """See `ringdl._training.replicas.Replica`; `result` is what becomes of it."""

    def __init__(self, index: int, leaf: Any) -> None:
        self.index = index
        self.shape, self.dtype = leaf.shape, str(leaf.dtype)
        self._leaf = leaf
        self._data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        self.nbytes = self._data.nbytes
        self._received: Bytes | None = None

    def read(self) -> Bytes:
        return np.array(self._data, order="C").reshape(-1).view(np.uint8)

    def write(self, elements: Bytes) -> None:
        self._received = elements

    def result(self) -> Any:
        if self._received is None:
            return self._leaf
        array = np.array(self._received).view(self._data.dtype).reshape(self._data.shape)
        if isinstance(self._leaf, np.ndarray):
            return array
        given = self._data
        placed = jax.device_put(array, given.sharding if given.committed else None)
        if _is_key(self._leaf):
            return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(self._leaf))
        return given.at[...].set(placed) if given.weak_type else placed

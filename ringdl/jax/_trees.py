"""Collectives of trees of arrays."""

from __future__ import annotations

from typing import Any

import jax

import ringdl


def broadcast_variables(
    tree: Any, root: int = 0, communicator: ringdl.Communicator | None = None
) -> Any:
    """A tree with the arrays of rank `root`: parameters, or an optimizer's state.

    Call it outside of compiled functions, before the first step.

    Args:
        tree: any pytree, of the same structure on all ranks; what is no array stays as it is.
        root: whose arrays they are to be.
        communicator: by default the one of `ringdl.init`.

    Raises:
        MismatchError: shapes or dtypes differ; on every rank.
    """
    its = ringdl.get_communicator() if communicator is None else communicator
    leaves, structure = jax.tree.flatten(tree)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    works = {i: its.broadcast_async(leaves[i], root) for i in arrays}
    for i, work in works.items():
        leaves[i] = work.wait()
    return jax.tree.unflatten(structure, leaves)

"""When ranks exchange what in training: ``DistributedOptimizer(optimizer, policy=...)``.

The script is the same for all of them. See docs/policies.md.
"""

from __future__ import annotations

from typing import Any

from ringdl import _joining
from ringdl._errors import UsageError
from ringdl.policies._async_gossip import AsyncGossip
from ringdl.policies._averaging import AllReduce, ParameterAveraging, PostLocalSGD
from ringdl.policies._diloco import DiLoCo
from ringdl.policies._elastic import EASGD
from ringdl.policies._gossip import Gossip
from ringdl.policies._policy import Model, Policy
from ringdl.policies._server import ParameterServer

__all__ = [
    "EASGD",
    "AllReduce",
    "AsyncGossip",
    "DiLoCo",
    "Gossip",
    "Model",
    "ParameterAveraging",
    "ParameterServer",
    "Policy",
    "PostLocalSGD",
    "start_over",
    "synchronize",
]


def start_over(optimizer: Any) -> None:
    """Begin anew with the parameters as they are, in the next step. Collective.

    For parameters that were loaded or changed in mid-training, on all ranks alike: what a policy
    keeps beside them (shards, a center, the start of a round) is of those before. The next step
    finds replicas that differ, as the first one does.

    Args:
        optimizer: a wrapped one. With `AllReduce` nothing is to be done.

    Raises:
        UsageError: see `synchronize`.
    """
    following = _following_of(optimizer)
    if following is not None:
        following.start_over()


def synchronize(optimizer: Any, parameters: Any = None) -> Any:
    """Make the parameters of all ranks the same, before they are evaluated or saved. Collective.

    Args:
        optimizer: a wrapped one. With `AllReduce` nothing is to be done.
        parameters: with optax, whose optimizers do not hold them: a tree; with those of
            ``ringdl.numpy``, on a rank that has made no step: as ``step`` takes them.

    Returns:
        With optax the parameters, else None.

    Raises:
        UsageError: the optimizer is not wrapped: pass what `DistributedOptimizer` has returned, not
            a chain of optax that it is in.
    """
    is_wrapped = hasattr(optimizer, "_ringdl_following")
    if parameters is not None and not is_wrapped and not _joining.let_ranks_differ():
        return parameters  # averaged gradients, in a chain of optax
    following = _following_of(optimizer)
    if following is None:
        return parameters
    return following.synchronize() if parameters is None else following.synchronize(parameters)


def _following_of(optimizer: Any) -> Any:
    if not hasattr(optimizer, "_ringdl_following"):
        raise UsageError(
            f"this {type(optimizer).__name__} is not wrapped; pass what DistributedOptimizer "
            "returned"
        )
    return optimizer._ringdl_following

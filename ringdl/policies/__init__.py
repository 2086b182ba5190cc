"""When ranks exchange what in training: ``DistributedOptimizer(optimizer, policy=...)``.

The script is the same for all of them. See docs/policies.md.
"""

from __future__ import annotations

from typing import Any

from ringdl._errors import UsageError
from ringdl.policies._averaging import AllReduce, ParameterAveraging, PostLocalSGD
from ringdl.policies._diloco import DiLoCo
from ringdl.policies._elastic import EASGD
from ringdl.policies._gossip import Gossip
from ringdl.policies._policy import Model, Policy
from ringdl.policies._server import ParameterServer

__all__ = [
    "EASGD",
    "AllReduce",
    "DiLoCo",
    "Gossip",
    "Model",
    "ParameterAveraging",
    "ParameterServer",
    "Policy",
    "PostLocalSGD",
    "synchronize",
]


def synchronize(optimizer: Any) -> None:
    """Make the parameters of all ranks the same, before they are evaluated or saved. Collective.

    Args:
        optimizer: a wrapped one. With `AllReduce` nothing is to be done.

    Raises:
        UsageError: it is not wrapped.
    """
    if not hasattr(optimizer, "_ringdl_following"):
        raise UsageError(
            f"this {type(optimizer).__name__} is not wrapped; pass what DistributedOptimizer "
            "returned"
        )
    if optimizer._ringdl_following is not None:
        optimizer._ringdl_following.synchronize()

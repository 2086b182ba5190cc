"""The policies that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringdl.policies import (
    EASGD,
    AllReduce,
    AsyncGossip,
    DiLoCo,
    Gossip,
    ParameterAveraging,
    ParameterServer,
    Policy,
    PostLocalSGD,
)


@dataclass(frozen=True)
class Choice:
    """A policy, as it is compared.

    Args:
        make: for so many steps.
        has_own_pace: whether ranks may make different numbers of steps.
        balanced_steps: where slower ranks make fewer steps in a round, those of the fastest.
        adds_up: whether what ranks learn is added up, so that rates are those of one rank divided
            by their number.
        ends_in_mean: whether the mean of all ranks' parameters is what would be used.
    """

    make: Callable[[int], Policy]
    has_own_pace: bool = False
    balanced_steps: int = 0
    adds_up: bool = False
    ends_in_mean: bool = True


CHOICES = {
    "AllReduce": Choice(lambda steps: AllReduce()),
    "ParameterAveraging, every 8": Choice(lambda steps: ParameterAveraging(8)),
    "ParameterAveraging, every 8, overlap": Choice(
        lambda steps: ParameterAveraging(8, optimizer_state="keep", overlap=True)
    ),
    "ParameterAveraging, every 8, balanced": Choice(
        lambda steps: ParameterAveraging(8, balance=True), balanced_steps=8
    ),
    "PostLocalSGD": Choice(lambda steps: PostLocalSGD(after=steps // 4, every=8)),
    "DiLoCo, 20 inner steps": Choice(lambda steps: DiLoCo(inner_steps=20)),
    "Gossip, ring": Choice(lambda steps: Gossip("ring")),
    "Gossip, exponential": Choice(lambda steps: Gossip("exponential")),
    "AsyncGossip": Choice(lambda steps: AsyncGossip(), has_own_pace=True),
    "ParameterServer": Choice(
        lambda steps: ParameterServer(), has_own_pace=True, adds_up=True, ends_in_mean=False
    ),
    "ParameterServer, staleness 4": Choice(
        lambda steps: ParameterServer(staleness=4), adds_up=True
    ),
    "EASGD, every 4": Choice(lambda steps: EASGD(4), has_own_pace=True, ends_in_mean=False),
}
BASE = "AllReduce"

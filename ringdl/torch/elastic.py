"""Jobs that go on without ranks that have failed: ``hvd.elastic``, as in scripts for Horovod."""

from __future__ import annotations

from typing import Any

import torch

from ringdl.elastic import ArrayState, ElasticSampler, ObjectState, State, run

__all__ = ["ArrayState", "ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class TorchState(State):
    """A `ringdl.elastic.State` of a model, its optimizer, and whatever else a loop needs.

    Args:
        model: restored in place.
        optimizer: wrapped or not; its gradients are zeroed when it is restored.
        values: further ones, as ``epoch=0, batch=0``.

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        named: dict[str, Any] = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in named.items() if value is not None}
        super().__init__(**given, **values)

"""Jobs that go on without ranks that have failed: ``hvd.elastic``, as in scripts for Horovod."""

from __future__ import annotations

from typing import Any

import torch

import ringdl
from ringdl.elastic import ArrayState, ElasticSampler, ObjectState, State, run
from ringdl.torch._state import first_part

__all__ = ["ArrayState", "ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class TorchState(State):
    """A `ringdl.elastic.State` of a model, its optimizer, and whatever else a loop needs.

    Args:
        model: restored in place.
        optimizer: wrapped or not; its gradients are zeroed when it is restored.
        values: further ones, as ``epoch=0, batch=0``.

    Raises:
        UsageError: ranks have different parts of the model (`ringdl.torch.parallel`).

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        if model is not None and ringdl.is_initialized():
            _refuse_parts(model)
        named: dict[str, Any] = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in named.items() if value is not None}
        super().__init__(**given, **values)


def _refuse_parts(model: torch.nn.Module) -> None:
    name = first_part(model.named_parameters(), ringdl.get_communicator())
    if name is not None:
        raise ringdl.UsageError(
            f"ranks have different parts of {name!r}, and a TorchState gives all ranks the "
            "same values; save ringdl.torch.parallel.state_dict(model) now and then, and start "
            "the job again from it (ringdl run --restarts)"
        )

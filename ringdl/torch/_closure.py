"""Closures of ``step(closure)``: evaluations that mean the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ringdl
from ringdl.torch._gradients import Gradients


def reduced_closure(closure: Callable[[], Any], gradients: Gradients) -> Callable[[], Any]:
    """A closure with the gradients and the loss of all ranks.

    The loss is reduced as the gradients are (Average or Sum), in float64 and in the order of the
    ranks, so that a line search takes the same decisions everywhere. Each evaluation averages
    gradients, so ranks that evaluate another number of times in a step are found out of step.

    Args:
        closure: the script's; returns a scalar tensor, a number, or None.
        gradients: averaged at the latest when it returns.

    Raises:
        MismatchError: on every rank, if ranks are out of step or some return None.
    """

    def evaluate() -> Any:
        gradients.expect_round()
        loss = closure()
        gradients.synchronize()
        return _reduce_loss(loss, gradients)

    return evaluate


def _reduce_loss(loss: Any, gradients: Gradients) -> Any:
    has_loss = loss is not None
    if isinstance(loss, torch.Tensor):
        loss = loss.detach()
    own = np.array([[has_loss, float(loss) if has_loss else 0.0]])
    rows = gradients.communicator.allgather(own, name=f"{gradients.key}.loss").tolist()
    without = [rank for rank, (given, _) in enumerate(rows) if not given]
    if len(without) == len(rows):
        return None
    if without:
        raise ringdl.MismatchError(
            f"the closure returned no loss on rank {', '.join(map(str, without))}; return the loss "
            "on all ranks or on none"
        )
    total = sum(value for _, value in rows)
    value = total / gradients.communicator.size if gradients.op == ringdl.Average else total
    return torch.full_like(loss, value) if isinstance(loss, torch.Tensor) else value

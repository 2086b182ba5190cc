"""Closures of ``step(closure)``: evaluations that mean the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringdl._training import Gradients
from ringdl._training.losses import reduce_loss


def reduced_closure(
    closure: Callable[[], Any], gradients: Gradients[torch.Tensor]
) -> Callable[[], Any]:
    """A closure with the gradients and the loss of all ranks.

    The loss is reduced as the gradients are, so that a line search takes the same decisions
    everywhere: see `ringdl._training.losses`. Each evaluation averages gradients, so ranks that
    evaluate another number of times in a step are found out of step.

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


def _reduce_loss(loss: Any, gradients: Gradients[torch.Tensor]) -> Any:
    tensor = loss.detach() if isinstance(loss, torch.Tensor) else None
    value = reduce_loss(None if loss is None else float(loss), gradients)
    return value if tensor is None or value is None else torch.full_like(tensor, value)

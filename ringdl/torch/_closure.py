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
    everywhere: see `ringdl._training.losses`. Each evaluation averages gradients, so ranks with
    different numbers of evaluations in a step are found out of step.

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
    own = loss.detach() if isinstance(loss, torch.Tensor) else loss
    value = reduce_loss(None if own is None else float(own), gradients)
    if isinstance(own, torch.Tensor) and value is not None:
        return torch.full_like(own, value)
    return value

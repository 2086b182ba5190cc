"""Closures of ``step(closure)``: evaluations that mean the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ringdl
from ringdl.torch._gradients import Gradients


def reduced_closure(
    closure: Callable[[], Any], gradients: Gradients, synchronizes: bool
) -> Callable[[], Any]:
    """A closure with the gradients and the loss of all ranks.

    The loss is reduced as the gradients are (Average or Sum), in float64 and in the order of the
    ranks, so that a line search takes the same decisions everywhere.

    Args:
        closure: the script's; returns a scalar tensor, a number, or None.
        gradients: averaged at the latest when it returns.
        synchronizes: False leaves the gradients as the closure leaves them.

    Raises:
        MismatchError: on every rank, if ranks run another number of evaluations in a step, or some
            return None.
    """
    evaluations = itertools.count(1)

    def evaluate() -> Any:
        gradients.expect_round()
        loss = closure()
        if synchronizes:
            gradients.synchronize()
        return _reduce_loss(loss, gradients, next(evaluations))

    return evaluate


def _reduce_loss(loss: Any, gradients: Gradients, evaluation: int) -> Any:
    has_loss = loss is not None
    if isinstance(loss, torch.Tensor):
        loss = loss.detach()
    own = [gradients.step, evaluation, has_loss, float(loss) if has_loss else 0.0]
    rows = gradients.communicator.allgather(
        np.array([own], np.float64), name=f"{gradients.key}.loss"
    )
    if (rows[:, :2] != rows[0, :2]).any():
        where = ", ".join(
            f"evaluation {int(row[1])} of step {int(row[0]) + 1} on rank {rank}"
            for rank, row in enumerate(rows)
        )
        raise ringdl.MismatchError(
            f"the closures of the ranks are not in step: {where}; every rank must evaluate its "
            "closure equally often in each step"
        )
    without = [rank for rank, row in enumerate(rows) if not row[2]]
    if len(without) == len(rows):
        return None
    if without:
        raise ringdl.MismatchError(
            f"the closure returned no loss on rank {', '.join(map(str, without))}; return the loss "
            "on all ranks or on none"
        )
    total = sum(rows[:, 3].tolist())
    value = total / len(rows) if gradients.op == ringdl.Average else total
    return torch.full_like(loss, value) if isinstance(loss, torch.Tensor) else value

"""Losses of closures: the same on every rank, so that a line search decides alike everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringdl
from ringdl._training.gradients import Gradients


def reduce_loss(loss: float | None, gradients: Gradients[Any]) -> float | None:
    """The loss of all ranks, reduced as the gradients are (Average or Sum). Collective.

    In float64, and in the order of the ranks.

    Raises:
        MismatchError: on every rank, if some have no loss.
    """
    own = np.array([[loss is not None, 0.0 if loss is None else loss]])
    rows = gradients.communicator.allgather(own, name=f"{gradients.key}.loss").tolist()
    without = [rank for rank, (given, _) in enumerate(rows) if not given]
    if len(without) == len(rows):
        return None
    if without:
        raise ringdl.MismatchError(
            f"the closure returned no loss on rank {', '.join(map(str, without))}; return the loss "
            "on all ranks or on none"
        )
    total = float(sum(value for _, value in rows))
    return total / gradients.communicator.size if gradients.op == ringdl.Average else total

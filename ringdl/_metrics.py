"""Averages of what ranks have measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringdl._engine import Kind
from ringdl._errors import MismatchError, UsageError
from ringdl._startup import get_communicator

if TYPE_CHECKING:
    from ringdl._communicator import Communicator


def average_metrics(
    metrics: Mapping[str, float],
    weight: float = 1.0,
    *,
    communicator: Communicator | None = None,
) -> dict[str, float]:
    """Average losses, accuracies and the like over all ranks. Collective.

    Args:
        metrics: numbers by name (also tensors of one element); the same names on all ranks.
        weight: how much this rank's count: the number of its samples, say, where ranks have more
            or fewer.
        communicator: the ranks; by default those of `ringdl.init`.

    Returns:
        The averages, in float64 and the same bits on all ranks; not a number where all weights are
        zero.

    Raises:
        MismatchError: on every rank, if names differ.
        UsageError: a metric, or the weight, is no number; the other ranks get a MismatchError.
    """
    import numpy as np

    own = communicator or get_communicator()
    names = sorted(metrics)
    with own._telling(Kind.allgather, None):
        numbers = [_number(metrics[name], f"the metric {name!r}") for name in names]
        share = _number(weight, "the weight")
    rows = own.allgather_object((names, share, numbers))
    for rank, (theirs, _, _) in enumerate(rows):
        if theirs != rows[0][0]:
            raise MismatchError(
                f"average_metrics: {', '.join(theirs) or 'nothing'} on rank {rank}, and "
                f"{', '.join(rows[0][0]) or 'nothing'} on rank 0; pass the same names on all ranks"
            )
    weights = np.array([row[1] for row in rows])
    values = np.array([row[2] for row in rows]).reshape(len(rows), len(names))
    counted = np.where(weights[:, None] > 0, values, 0)  # a rank without samples has no mean
    with np.errstate(invalid="ignore"):
        averages = (counted * weights[:, None]).sum(axis=0) / weights.sum()
    return dict(zip(names, averages.tolist(), strict=True))


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"average_metrics: {what} is {value!r}; pass a number") from None

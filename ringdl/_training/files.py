"""What rank 0 does with files, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import ringdl

Result = TypeVar("Result")


def on_rank_0(action: Callable[[], Result], problem: str, name: str) -> Result:
    """Run an action on rank 0 and return its result on all ranks. Collective.

    Args:
        action: called there alone; returns what can be pickled.
        problem: what errors say rank 0 cannot do.
        name: what the broadcast is matched by.

    Raises:
        UsageError: on every rank, if the action raises.
    """
    result: Result | ringdl.UsageError | None = None
    if ringdl.rank() == 0:
        try:
            result = action()
        except Exception as error:  # the others wait for an answer
            result = ringdl.UsageError(f"rank 0 {problem}: {error}")
    result = ringdl.get_communicator().broadcast_object(result, name=name)
    if isinstance(result, ringdl.UsageError):
        raise result
    return result

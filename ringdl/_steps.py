"""The step at which a rank is travels along with what is averaged, and ranks out of step are told.

One element is set out of eight, so any difference of steps but a multiple of eight is seen in each
dtype, after sums and averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringdl._errors import MismatchError

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

RESIDUES = 8
"""The elements of a note."""


def mark(note: Any, step: int) -> None:
    """Write a step into an array of `RESIDUES` elements."""
    note[...] = 0
    note[step % RESIDUES] = 1


def are_equal(note: Any) -> bool:
    """Whether all ranks had marked the same step, by the sum or average of their notes."""
    return int((note != 0).sum()) == 1


def raise_out_of_step(
    step: int, communicator: Communicator, name: str, what: str, rule: str
) -> None:
    """Raise on all ranks, naming each one's step. Collective, after notes that were not equal.

    Args:
        step: how many steps of the optimizer this rank has ended.
        communicator: the ranks.
        name: what the collective is matched by.
        what: has met.
        rule: what every rank must do.
    """
    import numpy as np

    steps = communicator.allgather(np.array([step]), name=name).tolist()
    where = " and ".join(
        f"step {each + 1} on {ranks_text([r for r, other in enumerate(steps) if other == each])}"
        for each in sorted(set(steps))
    )
    raise MismatchError(
        f"the ranks are out of step: {what} met that belong to {where}; every rank must {rule}; "
        "one that has no batch left calls join()"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 1, ...`` with eight of them at most."""
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"

"""How runs are timed.

Each run is timed by itself, from a barrier on, on every rank; afterwards a run's time is that of
the slowest rank. What is compared takes turns run by run, in a balanced order, so that all else
that the machine does affects them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import ringdl
from ringdl.bench._arrays import Rotation, Slot

if TYPE_CHECKING:
    from ringdl import Communicator

Array = NDArray[Any]

Run = Callable[[Slot], Any]
"""Runs a collective once; returns the array that holds this rank's result."""


@dataclass(frozen=True)
class Contender:
    """What is timed.

    Attributes:
        name: unique among those that take turns.
        run: see `Run`.
        checked: whether what it returns is the collective's result.
    """

    name: str
    run: Run
    checked: bool = True


@dataclass
class Measured:
    """What became of a contender.

    Attributes:
        name: its name.
        seconds: of each run, on the slowest rank.
        wrong: elements that were wrong, over all ranks and checked runs; None: not checked.
        refusal: why it was not run; empty if it was.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    wrong: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Times:
    """Median and spread, in seconds."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Meeting:
    """How ranks meet outside of what is measured.

    Attributes:
        barrier: returns once all ranks have called.
        slowest: the elementwise maximum of the ranks' arrays.
        total: the sum of the ranks' numbers.
    """

    barrier: Callable[[], object]
    slowest: Callable[[Array], Array]
    total: Callable[[int], int]


def meeting_of(world: Any, communicator: Communicator) -> Meeting:
    """Meet by MPI, where it is there: its barrier is short, and no part of what is measured.

    Args:
        world: an mpi4py communicator for this alone, or None.
        communicator: of all ranks.
    """
    if world is None:

        def largest(array: Array) -> Array:
            return communicator.allreduce_(array, ringdl.Max)

        def total(number: int) -> int:
            return int(communicator.allreduce(np.array([number]), ringdl.Sum)[0])

        return Meeting(communicator.barrier, largest, total)
    from mpi4py import MPI

    def slowest(array: Array) -> Array:
        world.Allreduce(MPI.IN_PLACE, array, op=MPI.MAX)
        return array

    return Meeting(world.Barrier, slowest, world.allreduce)


def summarize(seconds: Sequence[float]) -> Times:
    """Median, tenth and ninetieth percentile, linear between neighbours."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90])
    return Times(float(median), float(p10), float(p90))


def settling_runs(size: int) -> int:
    """How many untimed runs undo the effects of the contender before.

    Gloo, which sleeps in the kernel, leaves cold caches and sleeping cores: 1 KiB in the run after
    it took 98 us instead of 21, after two untimed runs 26. Large arrays hardly notice.

    Args:
        size: bytes of the case.
    """
    return 2 if size <= 1 << 20 else 1


def order_of(turn: int, count: int) -> list[int]:
    """The order of the contenders in a turn: a balanced Latin square (Williams 1949).

    Over 2 * count turns each has each place equally often, and follows each other equally often:
    what one leaves behind, such as a thread that is still awake, does not always affect the same
    one.
    """
    zigzag = [(k + 1) // 2 if k % 2 else -k // 2 for k in range(count)]
    order = [(turn + step) % count for step in zigzag]
    return order[::-1] if turn // count % 2 else order


def timed(
    contenders: Sequence[Contender],
    rotation: Rotation,
    meeting: Meeting,
    turns: int,
    settling: int,
    tick: Callable[[int], object] = lambda turn: None,
) -> Array:
    """Run each contender `turns` times. Collective.

    Args:
        contenders: what takes turns.
        rotation: gives the arrays.
        meeting: of the ranks.
        turns: how often each runs.
        settling: runs of the same, untimed, before each of these; see `settling_runs`.
        tick: gets the turn, outside of what is timed.

    Returns:
        Seconds of the slowest rank, by contender and turn.
    """
    seconds = np.zeros((len(contenders), turns))
    for turn in range(turns):
        tick(turn)
        for number in order_of(turn, len(contenders)):
            run = contenders[number].run
            for _ in range(settling):
                run(rotation.next())
            slot = rotation.next()
            meeting.barrier()
            begin = time.perf_counter()
            result = run(slot)
            seconds[number, turn] = time.perf_counter() - begin
            del result  # giving its memory back is not part of the next run
    return meeting.slowest(seconds)

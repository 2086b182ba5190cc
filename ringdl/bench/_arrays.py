"""The arrays that collectives get, and how they take turns.

They do so over several times the last-level cache: no run finds lines of its array in another
rank's cache, or in the state in which the run before has left them. Just before its run an array
is written anew, as a gradient is just before it is averaged; a small one is then in its own rank's
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import ringdl
from ringdl import _cuda

if TYPE_CHECKING:
    from ringdl.bench._collectives import Case

Array = NDArray[Any] | _cuda.Array

CACHE_MULTIPLE = 4
"""Arrays take turns over this many times the last-level cache."""

ASSUMED_CACHE_BYTES = 32 << 20
"""The last-level cache of a system that does not report it."""

LEAST_SLOTS = 2

_BESIDE = 4
"""Arrays of the same size beside those that take turns: the values to write, ringdl's result, what
a peer or Python keeps for a moment."""


@dataclass(eq=False)
class Slot:
    """A rank's arrays for one run.

    Attributes:
        source: what the collective takes.
        target: where peers put what they do not do in place; empty if there are none.
        source_bytes: all memory of the source, as bytes; the case's size if there is a target.
        target_bytes: of the target, likewise.
    """

    source: Array
    target: Array
    source_bytes: Array
    target_bytes: Array


class Rotation:
    """Arrays that take turns, and what they are to hold in each run.

    Args:
        slots: the arrays.
        write: gives a source the values of a run, by the run's number.
    """

    def __init__(self, slots: Sequence[Slot], write: Callable[[Array, int], object]) -> None:
        self._slots = slots
        self._write = write
        self.run = -1  # the number of the run that `next` was last called for

    def next(self) -> Slot:
        """The arrays of the next run, just written."""
        self.run += 1
        slot = self._slots[self.run % len(self._slots)]
        self._write(slot.source, self.run)
        return slot


def slot_count(size: int, runs: int, cache_bytes: int, memory_bytes: int) -> int:
    """How many arrays take turns.

    Args:
        size: bytes of one, with its target.
        runs: how many runs there will be; more arrays would never be used.
        cache_bytes: what they should exceed together.
        memory_bytes: what they may take on this rank, with what is needed beside them.

    Returns:
        At least `LEAST_SLOTS`, or 0 if even these do not fit.
    """
    if size == 0:
        return LEAST_SLOTS
    fitting = memory_bytes // size - _BESIDE
    if fitting < LEAST_SLOTS:
        return 0
    wanted = min(runs, -(-cache_bytes // size) + 1)
    return max(LEAST_SLOTS, min(wanted, fitting))


def allocate(count: int, dtype: np.dtype[Any], memory: str, device: int | None) -> Array:
    """Make an array for a collective, of any content.

    Args:
        count: elements.
        dtype: their dtype.
        memory: ``"ordinary"``, or ``"shared"`` by the ranks of a host.
        device: the number of a CUDA device; None for the CPU's memory.
    """
    array: Array
    if memory == "shared":
        array = ringdl.empty(count, dtype, device=device)
    elif device is not None:
        array = _cuda.Array((count,), dtype, device)
    else:
        array = np.empty(count, dtype)
    return array


def part(array: Array, count: int, dtype: np.dtype[Any]) -> Array:
    """The first elements of its memory, as of another dtype."""
    if isinstance(array, _cuda.Array):
        return _cuda.Array((count,), dtype, array.device, (array.address, array))
    flat: Array = array.view(dtype)[:count]
    return flat


def make_slots(
    case: Case, number: int, memory: str, *, with_targets: bool, device: int | None = None
) -> list[Slot]:
    """Make the arrays that take turns."""
    shape, dtype = case.shape, case.dtype
    room = max(shape.send, shape.receive) if with_targets else shape.send
    as_bytes = np.dtype(np.uint8)

    def make() -> Slot:
        source = allocate(room, dtype, memory, device)
        target = allocate(room if with_targets else 0, dtype, "ordinary", device)
        if isinstance(target, np.ndarray):
            target.fill(0)  # its pages are there before the first run
        return Slot(
            source if room == shape.send else part(source, shape.send, dtype),
            part(target, shape.receive, dtype) if with_targets else target,
            part(source, source.nbytes, as_bytes),
            part(target, target.nbytes, as_bytes),
        )

    return [make() for _ in range(number)]

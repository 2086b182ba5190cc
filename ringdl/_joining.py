"""What is told of ranks that join: steps are counted anew once all have joined."""

from __future__ import annotations

import weakref
from typing import Protocol


class StartsOver(Protocol):
    """Is notified when all ranks have joined."""

    def start_over(self) -> None: ...


class Leaves(StartsOver, Protocol):
    """Is notified before, when this rank joins, and of who joined last."""

    @property
    def lets_ranks_differ(self) -> bool:
        """Whether ranks have parameters of their own between two meetings."""

    def leave(self) -> None: ...
    def joined(self, last: int) -> None: ...


_alive: weakref.WeakSet[StartsOver] = weakref.WeakSet()
_leaving: weakref.WeakSet[Leaves] = weakref.WeakSet()
_at_own_pace: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def starts_over(each: StartsOver) -> None:
    """Have this one notified, for as long as it lives."""
    _alive.add(each)


def leaves(each: Leaves) -> None:
    """Likewise."""
    _alive.add(each)
    _leaving.add(each)


def trains_at_own_pace(each: object) -> None:
    """While it lives, others may go on for long without any call that a rank in join() notices."""
    _at_own_pace[id(each)] = each


def leave_all() -> Exception | None:
    """Notify them that this rank joins. Returns the first error: it has to join nevertheless."""
    first = None
    for each in list(_leaving):
        try:
            each.leave()
        except Exception as error:
            first = first or error
    return first


def have_own_pace() -> bool:
    """Whether something does that was passed to `trains_at_own_pace`."""
    return len(_at_own_pace) > 0


def let_ranks_differ() -> bool:
    """Whether some of them do, on this rank."""
    return any(each.lets_ranks_differ for each in list(_leaving))


def start_all_over(last: int) -> None:
    """Notify them that all have joined.

    Args:
        last: the rank that joined last.
    """
    for each in list(_alive):
        each.start_over()
    for leaving in list(_leaving):
        leaving.joined(last)

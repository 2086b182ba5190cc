"""What counts steps, and counts anew once all ranks have joined."""

from __future__ import annotations

import weakref
from typing import Protocol


class StartsOver(Protocol):
    """Is notified when all ranks have joined."""

    def start_over(self) -> None: ...


_alive: weakref.WeakSet[StartsOver] = weakref.WeakSet()


def starts_over(each: StartsOver) -> None:
    """Have this one notified, for as long as it lives."""
    _alive.add(each)


def start_all_over() -> None:
    """Notify all of them."""
    for each in list(_alive):
        each.start_over()

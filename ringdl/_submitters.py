"""Threads of frameworks that submit for another one, which waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringdl import _engine


@contextmanager
def for_caller(waits: bool) -> Iterator[None]:
    """What this thread submits here counts as that one's.

    Else two threads have submitted something, and of such ranks nobody knows whether they will
    submit more: where they wait for one another, that is only found when their time is over.

    Args:
        waits: whether there is such a caller; without one this changes nothing.
    """
    if not waits:
        yield
        return
    before = _engine.submit_for_caller(True)
    try:
        yield
    finally:
        _engine.submit_for_caller(before)

"""What the asynchronous forms return, and the names that are in flight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ringdl
from ringdl._work import GroupedWork, Work, _Waitable


class Handle(_Waitable):
    """Collectives in flight that are waited for as one: `synchronize` takes it, and `poll`.

    Args:
        works: the collectives.
        finish: makes what `synchronize` returns, once they have ended.
    """

    __slots__ = ("__weakref__", "_key", "_works")

    def __init__(
        self, works: Sequence[Work | GroupedWork | Handle], finish: Callable[[], Any]
    ) -> None:
        super().__init__(finish)
        self._works = works
        self._key: _Key | None = None

    def done(self) -> bool:
        """Whether all have ended, well or not. Never blocks."""
        ended = all(work.done() for work in self._works)
        if ended:
            self._free_name()
        return ended

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until they have ended; returns the tensor, or tensors. May be called again.

        Args:
            timeout: seconds for each; the default is RINGDL_TIMEOUT, or ten minutes.

        Raises:
            MismatchError: ranks disagree; raised on all of them.
            StallError: the timeout is over. They stay in flight: wait again.
        """

        def until_ended() -> None:
            for work in self._works:
                work.wait(timeout)

        try:
            return self._wait(until_ended)
        finally:
            self.done()

    def _free_name(self) -> None:
        if self._key is not None and _in_flight.get(self._key) is self:
            del _in_flight[self._key]
        self._key = None


_Key = tuple[ringdl.Communicator, str, str]
_in_flight: weakref.WeakValueDictionary[_Key, Handle] = weakref.WeakValueDictionary()
"""By communicator, kind and name: what this rank has begun, and has not seen to end."""


def begin(
    communicator: ringdl.Communicator,
    kind: str,
    name: str | None,
    start: Callable[[str | None], Handle],
) -> Handle:
    """Begin collectives under a name.

    Args:
        communicator: the ranks.
        kind: names are apart for each.
        name: None if they have none.
        start: submits them under the name that it gets, which says the kind, too.

    Raises:
        UsageError: this rank has begun one of that kind and name, and has not seen it end; nothing
            was submitted.
    """
    if name is None:
        return start(None)
    key = (communicator, kind, name)
    if key in _in_flight:
        raise ringdl.UsageError(
            f"{kind} {name!r} is in flight on this rank already; synchronize() it before its name "
            "is used again, or take another name"
        )
    handle = start(f"{kind}.{name}")
    handle._key = key
    _in_flight[key] = handle
    return handle


def synchronize(handle: Any) -> Any:
    """Wait for what an asynchronous form has begun; returns its tensor, or tensors.

    Raises:
        MismatchError: ranks disagree; raised on all of them.
        StallError: some rank has not come in time.
    """
    return handle() if not hasattr(handle, "wait") else handle.wait()


def poll(handle: Any) -> bool:
    """Whether `synchronize` would return at once."""
    return bool(handle.done())

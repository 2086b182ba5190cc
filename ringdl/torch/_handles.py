"""What the asynchronous forms return, and the names that are in flight.

A name is in flight from the call that begins its work until this rank has seen that work end. A
rank that drops the handle sees no end. Then the name stays in flight until the work has ended and
any other one after it: what may have ended a moment ago still counts, so whether two calls in a row
may have one name is not a matter of luck.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, overload

import torch

import ringdl
from ringdl import _arrays, _engine
from ringdl._errors import UsageError
from ringdl._work import GroupedWork, Result, Work, _Waitable


class Handle(_Waitable[Result]):
    """Collectives in flight that are waited for as one: `synchronize` takes it, and `poll`.

    Args:
        works: the collectives.
        finish: makes what `synchronize` returns, once they have ended.
    """

    __slots__ = ("__weakref__", "_key", "_works")

    def __init__(
        self,
        works: Sequence[Work[Any] | GroupedWork[Any] | Handle[Any]],
        finish: Callable[[], Result],
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

    def wait(self, timeout: float | None = None) -> Result:
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

    def __del__(self) -> None:
        key = getattr(self, "_key", None)
        if key is not None and key[1] == key[0].epoch:
            with suppress(ringdl.Error):  # in a forked child, say
                _dropped[key] = _Dropped([*self._engine_works()], _works_ended(key))

    def _free_name(self) -> None:
        if self._key is not None and _in_flight.get(self._key) is self:
            del _in_flight[self._key]
        self._key = None

    def _engine_works(self) -> Iterator[_engine.Work]:
        for work in self._works:
            if isinstance(work, Handle):
                yield from work._engine_works()
            else:
                yield from work.engine_works()


class _Dropped:
    """Works whose handle was dropped before this rank saw them end. Keeps no tensors.

    Args:
        works: all of the handle.
        works_ended: how many works of this rank had ended by then.
    """

    def __init__(self, works: list[_engine.Work], works_ended: int) -> None:
        self._works = works
        self._last = works_ended + sum(not work.ended for work in works)

    def is_over(self, works_ended: int) -> bool:
        """Whether they have ended, and another one since."""
        return works_ended > self._last and all(work.ended for work in self._works)


_Key = tuple[ringdl.Communicator, int, str, str]
_in_flight: weakref.WeakValueDictionary[_Key, Handle[Any]] = weakref.WeakValueDictionary()
"""By communicator, epoch, kind and name: what this rank has begun, and has not seen to end."""
_dropped: dict[_Key, _Dropped] = {}
"""The same for those that nobody will see to end."""


def _works_ended(key: _Key) -> int:
    return int(key[0].stats()["works"])


def _forget_dropped() -> None:
    for key, dropped in [*_dropped.items()]:
        communicator, epoch = key[:2]
        is_gone = epoch != communicator.epoch or communicator._engine.is_shut_down
        if is_gone or dropped.is_over(_works_ended(key)):
            del _dropped[key]


def begin(
    communicator: ringdl.Communicator,
    kind: str,
    name: str | None,
    start: Callable[[str | None], Handle[Result]],
) -> Handle[Result]:
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
        return _started(communicator, kind, None, start)
    key = (communicator, communicator.epoch, kind, name)
    if _dropped:
        _forget_dropped()
    if key in _in_flight or key in _dropped:
        raise ringdl.UsageError(
            f"{kind} {name!r} is in flight on this rank already; synchronize() it before its name "
            "is used again, or take another name"
        )
    handle = _started(communicator, kind, f"{kind}.{name}", start)
    handle._key = key
    _in_flight[key] = handle
    return handle


def _started(
    communicator: ringdl.Communicator,
    kind: str,
    name: str | None,
    start: Callable[[str | None], Handle[Result]],
) -> Handle[Result]:
    try:
        return start(name)
    except Exception as error:
        if kind in _engine.Kind.__members__:  # one work, which the others may wait for
            communicator._refuse(error, _engine.Kind[kind], name)
        raise


def require_tensors(*tensors: Any) -> None:
    """Check the arguments of collectives of this package.

    Raises:
        UsageError: one is no tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ringdl.UsageError(
                f"ringdl.torch takes torch tensors, not {type(tensor).__name__}: pass "
                "torch.as_tensor(x), or call ringdl's own functions, which take NumPy arrays"
            )


def copied(tensor: Any) -> Any:
    """A contiguous copy, for the forms that leave their argument alone."""
    return _arrays.copy_of(tensor) if isinstance(tensor, torch.Tensor) else tensor


def is_tracked(tensor: Any) -> bool:
    """Whether autograd wants to know what becomes of it."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


@overload
def synchronize(handle: Handle[Result]) -> Result: ...
@overload
def synchronize(handle: Callable[[], Result]) -> Result: ...
def synchronize(handle: Any) -> Any:
    """Wait for what an asynchronous form has begun; returns its tensor, or tensors.

    Raises:
        MismatchError: ranks disagree; raised on all of them.
        StallError: some rank has not arrived in time.
        UsageError: it is no such thing.
    """
    if hasattr(handle, "wait"):
        return handle.wait()
    if not callable(handle):
        raise UsageError(f"synchronize({handle!r}): pass what an asynchronous form has returned")
    return handle()


def poll(handle: Any) -> bool:
    """Whether `synchronize` would return at once."""
    return bool(handle.done())

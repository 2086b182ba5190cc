"""A collective in flight, as Python sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringdl._errors import StallError, UsageError

if TYPE_CHECKING:
    from ringdl import _engine


Result = TypeVar("Result")
Each = TypeVar("Each")


def seconds_of(timeout: Any) -> float:
    """A timeout as the engine takes it.

    Raises:
        UsageError: it is no number of seconds.
    """
    try:
        seconds = float("nan" if isinstance(timeout, str) else timeout)
    except (OverflowError, TypeError, ValueError):
        seconds = float("nan")
    if not seconds >= 0:
        raise UsageError(f"timeout is {timeout!r}; pass a number of seconds, not less than 0")
    return seconds


class _Waitable(Generic[Result]):
    """What is waited for, and what its `wait` returns: the same to all threads, made once."""

    __slots__ = ("_finish", "_lock", "_result")

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish  # until it has been called
        self._lock = RLock()
        self._result: Any = None

    def _wait(self, until_ended: Callable[[], None]) -> Result:
        if self._finish is not None:
            try:
                until_ended()
            except StallError as error:
                error.work = self  # type: ignore[assignment]
                raise
            with self._lock:
                if self._finish is not None:
                    self._result = self._finish()
                    self._finish = None  # with the arrays that it has: they may be given away
        result: Result = self._result
        return result


class Work(_Waitable[Result]):
    """One collective in flight, and what its `wait` returns.

    Its array stays alive until the collective has ended, even if the work is dropped; until then it
    must be neither read nor written.
    """

    __slots__ = ("_engine", "_source", "_timeout", "_work")

    def __init__(
        self,
        engine: _engine.Communicator,
        work: _engine.Work,
        timeout: float,
        finish: Callable[[], Result],
    ) -> None:
        super().__init__(finish)
        self._engine = engine
        self._work = work
        self._timeout = timeout
        self._source: int | None = None

    @property
    def source(self) -> int | None:
        """Of a receive, the rank that has sent the message; None until that is known."""
        if self._source is None and self._work.sender >= 0:
            self._source = self._work.sender
        return self._source

    def done(self) -> bool:
        """Whether the collective has ended, well or not. Never blocks."""
        if not self._work.ended:
            self._engine.poll()  # below MPI_THREAD_MULTIPLE nothing else moves it
        return self._work.ended

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the collective has ended, and return its array.

        May be called again, and by several threads; all get the same array.

        Args:
            timeout: seconds; the default is RINGDL_TIMEOUT, or ten minutes.

        Raises:
            MismatchError: ranks disagree on the key; raised on all of them.
            StallError: the timeout is over. The work stays in flight: wait again.
            UsageError: the timeout is no number of seconds.
        """
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        return self._wait(lambda: self._engine.wait(self._work, seconds, timeout is None))

    def engine_works(self) -> Iterator[_engine.Work]:
        """As the engine knows it: without the caller's array."""
        yield self._work

    def __repr__(self) -> str:
        return f"<ringdl.Work {self._work.label}, {'ended' if self.done() else 'in flight'}>"


class GroupedWork(_Waitable[list[Each]], Generic[Each]):
    """Several collectives that are waited for as one: see `Communicator.grouped_allreduce`."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work[Any]], finish: Callable[[], list[Each]]) -> None:
        super().__init__(finish)
        self._works = works

    def done(self) -> bool:
        """Whether all have ended, well or not. Never blocks."""
        return all(work.done() for work in self._works)

    def wait(self, timeout: float | None = None) -> list[Each]:
        """Wait until all have ended, and return the arrays. May be called again.

        Args:
            timeout: seconds for each of the collectives; see `Work.wait`, also for the errors.
        """

        def until_ended() -> None:
            first: Exception | None = None
            for work in self._works:  # all of them: their arrays are off limits until then
                try:
                    work.wait(timeout)
                except StallError:
                    raise
                except Exception as error:
                    first = first or error
            if first is not None:
                try:
                    raise first
                finally:
                    del first  # it holds this frame, and so the works, in a cycle

        return self._wait(until_ended)

    def engine_works(self) -> Iterator[_engine.Work]:
        """As the engine knows them."""
        for work in self._works:
            yield from work.engine_works()

    def __repr__(self) -> str:
        return (
            f"<ringdl.GroupedWork of {len(self._works)}, {'ended' if self.done() else 'in flight'}>"
        )


@contextmanager
def one_of_several_steps() -> Iterator[None]:
    """Within a call that makes several collectives, which `wait` cannot complete."""
    try:
        yield
    except StallError as error:
        error.work = None
        raise

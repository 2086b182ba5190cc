"""What all parts of a communicator share: its ranks, and how a collective is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ringdl import _arrays, _engine
from ringdl._errors import UsageError
from ringdl._work import Work, seconds_of

if TYPE_CHECKING:
    from ringdl._arrays import Operand

P = ParamSpec("P")
Result = TypeVar("Result")
AnyBase = TypeVar("AnyBase", bound="Base")


class Base:
    """The ranks of a communicator and the engine that moves its works."""

    def _use(
        self, engine: _engine.Communicator, group: _engine.Group | None, timeout: float
    ) -> None:
        """Take what all parts need; several times, if the engine is replaced.

        Args:
            engine: the engine; several communicators may share one.
            group: its ranks, or None for all of the engine's.
            timeout: seconds of a wait that names none.
        """
        self._engine = engine
        self._group = group
        self._timeout = timeout

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``size - 1``."""
        return self._engine.rank if self._group is None else self._group.rank

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return self._engine.size if self._group is None else len(self._group.ranks)

    def _refuse(
        self,
        error: Exception,
        kind: _engine.Kind,
        *names: str | None,
        group: _engine.Group | None = None,
    ) -> None:
        """Notify the other ranks that calls of these names fail here; they count as made.

        Their calls raise MismatchError; else they would wait for this rank, or match its next one.
        Notifies once, however many callers `error` passes through.
        """
        if getattr(error, "_is_told", False):
            return
        error._is_told = True  # type: ignore[attr-defined]
        with suppress(Exception):  # a rank that cannot notify, as it is shut down, say
            for name in names:
                text = name if isinstance(name, str) else ""
                self._engine.refuse(kind, text, group or self._group, str(error))

    def _copy_of(self, x: Any, kind: _engine.Kind, name: str | None) -> Any:
        """For a call of this kind and name: see `ringdl._arrays.copy_of`."""
        try:
            return _arrays.copy_of(x)
        except Exception as error:
            self._refuse(error, kind, name)
            raise

    @contextmanager
    def _telling(self, kind: _engine.Kind, *names: str | None) -> Iterator[None]:
        """Notify the other ranks of errors in the block, which precedes calls of these names."""
        try:
            yield
        except Exception as error:
            self._refuse(error, kind, *names)
            raise

    def _refuse_timeout(self, timeout: Any, kind: _engine.Kind, name: str | None) -> None:
        """Refuse a call with a wrong timeout, before it is made.

        Raises:
            UsageError: it is no number of seconds; the call counts as made.
        """
        if timeout is not None:
            with self._telling(kind, name):
                seconds_of(timeout)

    def _submit(
        self,
        kind: _engine.Kind,
        operand: Operand | None,
        name: str | None,
        finish: Callable[[_engine.Work], Result],
        *,
        group: _engine.Group | None = None,
        is_async: bool = False,
        **call: Any,
    ) -> Work[Result]:
        """Start a work; `finish` turns it, once it has ended, into what the caller gets."""
        if not isinstance(name, str | None):
            raise UsageError(f"name is {name!r}; pass a string, or None")
        work = self._engine.submit(
            kind,
            None if operand is None else operand.handed,
            None if operand is None else operand.dtype,
            name=name or "",
            group=self._group if group is None else group,
            **call,
        )
        if is_async:
            self._engine.wake()
        return Work(self._engine, work, self._timeout, lambda: finish(work))


def refusing(
    kind: _engine.Kind,
) -> Callable[
    [Callable[Concatenate[AnyBase, str | None, P], Result]],
    Callable[Concatenate[AnyBase, str | None, P], Result],
]:
    """Decorate a method that submits a collective of this kind under a name, its first argument.

    The other ranks are notified of what it raises before it has submitted anything: see
    `Base._refuse`.
    """

    def decorate(
        method: Callable[Concatenate[AnyBase, str | None, P], Result],
    ) -> Callable[Concatenate[AnyBase, str | None, P], Result]:
        @wraps(method)
        def call(self: AnyBase, name: str | None, *args: P.args, **kwargs: P.kwargs) -> Result:
            try:
                return method(self, name, *args, **kwargs)
            except Exception as error:
                self._refuse(error, kind, name)
                raise

        return call  # type: ignore[return-value]

    return decorate

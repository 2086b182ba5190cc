"""What all parts of a communicator share: its ranks, and how a collective is submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringdl import _engine
from ringdl._work import Work

if TYPE_CHECKING:
    from ringdl._arrays import Operand


class Base:
    """The ranks of a communicator and the engine that moves its works.

    Args:
        engine: the engine; several communicators may share one.
        group: its ranks, or None for all of the engine's.
        timeout: seconds of a wait that names none.
    """

    def __init__(
        self, engine: _engine.Communicator, group: _engine.Group | None, timeout: float
    ) -> None:
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

    def _submit(
        self,
        kind: _engine.Kind,
        operand: Operand | None,
        name: str | None,
        finish: Callable[[_engine.Work], Any],
        *,
        group: _engine.Group | None = None,
        is_async: bool = False,
        **call: Any,
    ) -> Work:
        """Start a work; `finish` turns it, once it has ended, into what the caller gets."""
        work = self._engine.submit(
            kind,
            None if operand is None else operand.array,
            None if operand is None else operand.dtype,
            name=name or "",
            group=self._group if group is None else group,
            **call,
        )
        if is_async:
            self._engine.wake()
        return Work(self._engine, work, self._timeout, lambda: finish(work))

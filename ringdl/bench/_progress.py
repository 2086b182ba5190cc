"""One line on a terminal that says how far the measurement is."""

from __future__ import annotations

import sys

from ringdl.bench._collectives import Case


class Progress:
    """Overwrites its own line on stderr; silent unless that is a terminal.

    Args:
        shows: whether this rank is the one that prints.
        cases: how many there will be.
        turns: iterations of each.
    """

    def __init__(self, shows: bool, cases: int, turns: int) -> None:
        self._shows = shows and sys.stderr.isatty()
        self._cases = cases
        self._turns = turns
        self._number = 0
        self._case = ""

    def begin(self, case: Case) -> None:
        """The next case begins, with its preparations."""
        self._number += 1
        self._case = f"{self._number} of {self._cases}: {case.shape.size} B"
        self._write(f"# {self._case}")

    def tick(self, turn: int) -> None:
        """An iteration begins; they count from 0."""
        self._write(f"# {self._case}, iteration {turn + 1} of {self._turns}")

    def clear(self) -> None:
        """Make room for output."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._shows:
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()

"""When ranks that train by themselves meet: after so many steps, or in the time of the fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence

_KEPT = 0.8
"""What a round counts, for how long a step takes, against the one after it."""


class Rounds:
    """Counts a rank's steps from one mean to the next.

    If rounds are balanced, a rank makes as many steps in one as fit into the time in which the
    fastest of them makes `every`, and at least one. Ranks tell how long a step took when they meet,
    and what they tell decides the next round; until they have told, each makes one step. They tell
    a mean over the last rounds, so that one that was disturbed does not shorten the next.

    Args:
        every: the most steps of a round.
        are_balanced: whether slower ranks make fewer.
    """

    def __init__(self, every: int, are_balanced: bool) -> None:
        self._every, self._are_balanced = every, are_balanced
        self.start_over(0)

    @property
    def rule(self) -> str:
        """What every rank must do to meet the others."""
        if self._are_balanced:
            return "end its steps when the policy's `rounds` has reached the same number"
        return "call step() equally often"

    def start_over(self, step: int) -> None:
        """The first round begins after so many steps of the optimizer."""
        self.number = 0
        """How many rounds have ended."""
        self._start = self._first = step
        self._steps = 1 if self._are_balanced else self._every
        self._began: float | None = None  # the first step began before this is called
        self._recent_steps = self._recent_seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Whether the round is over for this rank."""
        return step - self._first >= self._steps

    def mark(self, step: int) -> int:
        """What a mean after this step is known by: ranks whose marks differ are out of step."""
        if self._are_balanced:
            return self.number + self.is_due(step)
        return (step - self._start) // self._every

    def weight(self, step: int) -> float:
        """What this rank counts in the mean: its share of `every`; 1 if rounds are not balanced."""
        return max(1, step - self._first) / self._every if self._are_balanced else 1.0

    def seconds(self, step: int) -> float:
        """How long a step takes; 0 where that is not known or does not matter. Once a round."""
        made = step - self._first
        if not self._are_balanced or self._began is None or made == 0:
            return 0.0
        spent = time.perf_counter() - self._began
        self._recent_steps = _KEPT * self._recent_steps + made
        self._recent_seconds = _KEPT * self._recent_seconds + spent
        return self._recent_seconds / self._recent_steps

    def end(self, step: int, own: float, all_of_them: Sequence[float]) -> None:
        """The ranks have met.

        Args:
            step: after which the next round begins.
            own: what `seconds` was when this rank came.
            all_of_them: the same of each rank.
        """
        self.number += 1
        self._first, self._began = step, time.perf_counter()
        known = [each for each in all_of_them if each > 0]
        if self._are_balanced and own > 0 and known:
            self._steps = max(1, min(self._every, round(self._every * min(known) / own)))

"""How many steps a rank makes between two means."""

import pytest

from ringdl.policies import _rounds
from ringdl.policies._rounds import Rounds


class Clock:
    """Stands for the module `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    its = Clock()
    monkeypatch.setattr(_rounds, "time", its)
    return its


class Ranks:
    """Two of them, whose steps take so many seconds."""

    def __init__(self, clock: Clock, every: int) -> None:
        self._clock = clock
        self.rounds = [Rounds(every, are_balanced=True) for _ in range(2)]
        self._steps = [0, 0]

    def meet(self, *seconds: float) -> list[int]:
        """One round; how many steps each has made in it."""
        told, before, begin = [], [*self._steps], self._clock.now
        for rank, rounds in enumerate(self.rounds):
            self._clock.now = begin
            while True:
                self._steps[rank] += 1
                self._clock.now += seconds[rank]
                if rounds.is_due(self._steps[rank]):
                    break
            told.append(rounds.seconds(self._steps[rank]))
        self._clock.now = begin + 60  # when the last one has come
        for step, own, rounds in zip(self._steps, told, self.rounds, strict=True):
            rounds.end(step, own, told)
        return [step - old for step, old in zip(self._steps, before, strict=True)]


def test_equal_rounds() -> None:
    rounds = Rounds(3, are_balanced=False)
    rounds.start_over(2)
    for number, step in enumerate((5, 8, 11)):
        assert not rounds.is_due(step - 1)
        assert rounds.is_due(step)
        assert rounds.mark(step) == number + 1
        assert (rounds.weight(step), rounds.seconds(step)) == (1.0, 0.0)
        rounds.end(step, 0.0, [0.0, 0.0])
        assert rounds.number == number + 1


def test_a_slower_rank_makes_as_many_steps_as_fit(clock: Clock) -> None:
    ranks = Ranks(clock, 8)
    assert ranks.meet(1, 4) == [1, 1], "nobody knows how long the first step took"
    assert ranks.meet(1, 4) == [1, 1]
    for _ in range(3):
        assert ranks.meet(1, 4) == [8, 2], "what was waited for the other does not count"


def test_no_rank_makes_none(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    for _ in range(2):
        ranks.meet(1, 40)
    assert ranks.meet(1, 40) == [2, 1]


def test_one_disturbed_round_hardly_matters(clock: Clock) -> None:
    ranks = Ranks(clock, 8)
    for _ in range(6):
        ranks.meet(1, 1)
    ranks.meet(1, 2)
    own = ranks.meet(1, 1)[1]
    assert 6 <= own < 8
    for _ in range(12):
        ranks.meet(1, 1)
    assert ranks.meet(1, 1) == [8, 8]


def test_marks_tell_a_rank_that_has_made_fewer_rounds(clock: Clock) -> None:
    del clock
    rounds = Rounds(4, are_balanced=True)
    assert rounds.mark(1) == 1, "the first round is over after a step"
    assert rounds.mark(0) == 0, "as of a rank that synchronizes instead"


def test_weights_are_shares_of_the_most_steps(clock: Clock) -> None:
    ranks = Ranks(clock, 8)
    for _ in range(3):
        ranks.meet(1, 4)
    fast, slow = ranks.rounds
    assert (fast.weight(10 + 8), slow.weight(4 + 2)) == (1.0, 0.25)

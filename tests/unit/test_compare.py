"""Figures of the comparison, from curves made by hand."""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from ringdl.compare import main
from ringdl.compare._command import _LONG, _SHORT, Comparison, Effort
from ringdl.compare._policies import BASE, CHOICES
from ringdl.compare._report import for_json, table
from ringdl.compare._run import Curve, Run, _Pace
from ringdl.compare._summary import best_rates, summarize
from ringdl.compare._tasks import TASKS


def curve(policy: str, loss: list[float], second: float = 1.0, **its: Any) -> Curve:
    """A snapshot every 10 examples, of as many seconds each; the accuracy is 1 - loss / 10."""
    steps = range(1, len(loss) + 1)
    run = Run("digits", policy, its.get("rate", 0.1), its.get("seed", 0), 2 * len(loss), 16)
    return Curve(
        run,
        2,
        [10 * step for step in steps],
        [second * step for step in steps],
        loss,
        [1 - each / 10 for each in loss],
        [600.0 * step for step in steps],
        its.get("distance", 0.0),
        0.25,
    )


BASE_CURVE = curve(BASE, [8, 6, 4, 2, 2, 2, 2, 2])


def test_figures() -> None:
    slowly = curve("Gossip, ring", [9, 8, 7, 6, 5, 4, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2], 0.5)
    rows = summarize(
        [BASE_CURVE, slowly],
        [
            curve(BASE, [8, 6, 4, 2, 2, 2, 2, 2], 4.0),
            curve("Gossip, ring", [9, 7, 5, 3, 1, 1, 1, 1, 1], 1.0),
        ],
        [BASE_CURVE, slowly],
    )
    base, other = rows
    assert (base.policy, other.policy) == (BASE, "Gossip, ring")
    assert base.loss == 2
    assert base.to_loss == base.seconds == base.slow_seconds == 1
    assert base.examples == pytest.approx(0.5 * 0.975, abs=0.02)  # of 80; within 0.01 at loss 2.1
    assert other.loss == 3, "after as many examples as the base has had"
    # To 2 + 0.02 (8 - 2), between two snapshots.
    assert other.to_loss == pytest.approx(88.8 / 39.4)
    assert other.seconds == pytest.approx(4.44 / 3.94)
    assert other.slow_seconds == pytest.approx(4.44 / 15.76)
    assert other.step == 0.5
    assert other.bytes == 300
    assert "Gossip, ring" in table(rows)


def test_what_is_not_reached() -> None:
    never = curve("EASGD, every 4", [9] * 16, distance=1.5)
    broken = curve("DiLoCo, 20 inner steps", [math.nan] * 16)
    rows = summarize([BASE_CURVE, never, broken], [BASE_CURVE, never], [])
    for row in rows[1:]:
        assert math.isinf(row.examples)
        assert math.isinf(row.to_loss)
    assert math.isnan(rows[0].bytes)
    assert rows[1].distance == 1.5
    assert " - " in table(rows)


def test_seeds() -> None:
    """Each beside the base of the same seed, which always reaches its own loss."""
    curves = [curve(BASE, [8, 6, 4, last, last, last, last, last], seed=last) for last in (1, 2, 3)]
    (row,) = summarize(curves, curves[2:], [])
    assert row.loss == 2
    assert row.to_loss == row.seconds == row.slow_seconds == 1
    assert row.accuracy == pytest.approx((0.8, 0.7, 0.9))


def test_rates() -> None:
    curves = [
        curve(BASE, [5, 5, 5, 5], rate=0.1),
        curve(BASE, [9, 3, 3, 3], rate=0.2),
        curve(BASE, [1, math.nan, math.nan, math.nan], rate=0.4),
        curve("EASGD, every 4", [4, 4, 4, 4], rate=0.4),
    ]
    assert best_rates(curves) == {BASE: 0.2, "EASGD, every 4": 0.4}
    lucky = [curve(BASE, [1, 1, 1, 1], rate=0.1), curve(BASE, [9, 9, 9, 9], rate=0.1)]
    assert best_rates([*curves, *lucky])[BASE] == 0.2


def test_a_run_so_short_that_no_snapshot_is_in_its_last_part() -> None:
    """The one before counts."""
    few = curve("ParameterAveraging, every 8, balanced", [9, 5, 1])
    few = dataclasses.replace(few, examples=[10, 60, 130])
    rows = summarize([BASE_CURVE, few], [], [])
    assert (rows[0].loss, rows[1].loss) == (2, 5)


def test_what_is_written_is_json() -> None:
    """JavaScript's, too, which knows no Infinity and no NaN."""
    rows = summarize([BASE_CURVE, curve("EASGD, every 4", [math.nan] * 16)], [], [])
    text = json.dumps(for_json([asdict(row) for row in rows]), allow_nan=False)
    assert [row["bytes"] for row in json.loads(text)] == [None, None]
    assert json.loads(text)[1]["examples"] is None
    assert json.loads(text)[0]["loss"] == 2


def test_a_rate_at_the_end_of_those_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(_: Comparison, runs: Sequence[Run], **settings: str) -> list[Curve]:
        losses = [abs(run.rate - 0.1) if run.policy == BASE else 1 / run.rate for run in runs]
        return [
            curve(run.policy, [loss] * 32, rate=run.rate, seed=run.seed)
            for run, loss in zip(runs, losses, strict=True)
        ]

    monkeypatch.setattr(Comparison, "_job", job)
    chosen = argparse.Namespace(slow=4.0, start=None)
    comparison = Comparison("digits", 1, Effort((1,), 1, 1), [BASE, "EASGD, every 4"], chosen)
    base, other = comparison.carry_out()[0]
    assert not base.rate_is_at_end
    assert other.rate_is_at_end
    assert "!" in table([other])
    assert "!" not in table([base])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--policies Voting", "--policies Voting: there are AllReduce, "),
        ("--seeds 0", "--seeds: pass a positive number"),
        ("--shorter nan", "--shorter: pass a positive number"),
        ("--slow 0.5", "--slow: pass how many times longer the slow rank's steps are, at least 1"),
        ("--start nowhere", "--start nowhere: there is no such program"),
        ("--start it's", "--start it's: No closing quotation"),
        ("--tasks gpt --ranks 2 33", "--ranks 33: there are more ranks than samples in a step"),
        ("--json /nowhere/found.json", "--json /nowhere/found.json cannot be written"),
        ("--json /tmp", "--json /tmp cannot be written: Is a directory"),
        ("--plots /dev/null/plots", "--plots /dev/null/plots: Not a directory"),
    ],
)
def test_wrong_use(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is trained."""
    if "plots" in words:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_slow_rank_is_as_slow_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the default's steps, where no rank is slow."""
    asked: list[Run] = []

    def job(_: Comparison, runs: Sequence[Run], **settings: str) -> list[Curve]:
        asked.extend(runs)
        its = [curve(run.policy, [0.1] * 32, 1.0 if run.policy == BASE else 5.0) for run in runs]
        return [dataclasses.replace(each, run=run) for each, run in zip(its, runs, strict=True)]

    monkeypatch.setattr(Comparison, "_job", job)
    chosen = argparse.Namespace(slow=4.0, start=None)
    Comparison("digits", 2, Effort((2,), 1, 1), [BASE, "EASGD, every 4"], chosen).carry_out()
    step = 32 / next(run.steps for run in asked if run.policy == BASE)
    assert {(run.slow, run.period) for run in asked} == {(1, 0), (4, 4 * step)}


def test_a_slow_rank_s_steps_are_as_long_whatever_they_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if that takes longer after a sleep; and a step that was too long is not made up for."""
    now, begun = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    pace = _Pace(4.0)
    for computes in (1.0, 2.0, 1.5, 9.0, 1.0, 2.0):
        sleep(computes)
        pace.keep()
        begun.append(now)
    assert begun == [4, 8, 12, 21, 25, 29]


def test_every_policy_and_task_is_there() -> None:
    assert _SHORT.keys() == _LONG.keys() == TASKS.keys()
    for choice in CHOICES.values():
        assert choice.make(320) is not None

"""Figures of the comparison, from curves made by hand."""

import math
from typing import Any

import pytest

from ringdl.compare._command import _LONG, _SHORT
from ringdl.compare._policies import BASE, CHOICES
from ringdl.compare._report import table
from ringdl.compare._run import Curve, Run
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
    assert other.to_loss == 90 / 40
    assert other.seconds == 4.5 / 4
    assert other.slow_seconds == 4.5 / 16, "between two snapshots"
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


def test_every_policy_and_task_is_there() -> None:
    assert _SHORT.keys() == _LONG.keys() == TASKS.keys()
    for choice in CHOICES.values():
        assert choice.make(320) is not None

"""From curves to figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ringdl.compare._policies import BASE
from ringdl.compare._run import Curve

_LAST = 4
"""Snapshots, of which the median is what a run has reached."""


@dataclass(frozen=True)
class Row:
    """A policy beside gradients that are averaged in each step, for one task on so many ranks.

    Medians over seeds; infinite where it is not reached. Examples and seconds are shares of those
    of the base.

    Args:
        policy: its name.
        rate: the best learning rate.
        loss: after as many examples as the base has had.
        accuracy: the same; then the lowest and the highest of all seeds.
        examples: to the base's accuracy, but for 0.01.
        to_loss: examples to the base's loss.
        step: seconds of a step.
        seconds: to the base's loss.
        slow_seconds: the same, with a slow rank in both.
        bytes: that each rank sends in a step, where ranks share no memory.
        distance: of parameters from the base's, after twice its examples.
        disagreement: of guesses from the base's, likewise.
    """

    policy: str
    rate: float
    loss: float
    accuracy: tuple[float, float, float]
    examples: float
    to_loss: float
    step: float
    seconds: float
    slow_seconds: float
    bytes: float
    distance: float
    disagreement: float


def score(curve: Curve) -> float:
    """What rates are chosen by: the loss in the end."""
    return _reached(curve.loss)


def best_rates(curves: Sequence[Curve]) -> dict[str, float]:
    """For each policy, the rate with the lowest loss in the end."""
    best: dict[str, Curve] = {}
    for curve in curves:
        policy = curve.run.policy
        if policy not in best or score(curve) < score(best[policy]):
            best[policy] = curve
    return {policy: curve.run.rate for policy, curve in best.items()}


def summarize(
    curves: Sequence[Curve], slowed: Sequence[Curve], apart: Sequence[Curve]
) -> list[Row]:
    """A row for each policy.

    Args:
        curves: of all seeds, of one task on so many ranks, each at the policy's best rate; the
            base's half as long as the others.
        slowed: the same with a slow rank.
        apart: of ranks that share no memory.
    """
    base = [curve for curve in curves if curve.run.policy == BASE]
    target_accuracy = median(_reached(curve.accuracy) for curve in base) - 0.01
    target_loss = median(_reached(curve.loss) for curve in base)
    budget = base[0].examples[-1]
    base_to_loss = _median(base, lambda curve: _first(curve.examples, curve.loss, target_loss))
    base_seconds = _median(base, lambda curve: _first(curve.seconds, curve.loss, target_loss))
    base_step = _median(base, _step)
    slow_base = [curve for curve in slowed if curve.run.policy == BASE]
    base_slow = _median(slow_base, lambda curve: _first(curve.seconds, curve.loss, target_loss))
    rows = []
    for policy in dict.fromkeys(curve.run.policy for curve in curves):
        its = [curve for curve in curves if curve.run.policy == policy]
        its_slow = [curve for curve in slowed if curve.run.policy == policy]
        its_apart = [curve for curve in apart if curve.run.policy == policy]
        accuracies = [_reached(_until(curve, budget, curve.accuracy)) for curve in its]
        rows.append(
            Row(
                policy,
                its[0].run.rate,
                median(_reached(_until(curve, budget, curve.loss)) for curve in its),
                (median(accuracies), min(accuracies), max(accuracies)),
                _median(
                    its,
                    lambda curve: (
                        _first(curve.examples, [-a for a in curve.accuracy], -target_accuracy)
                        / budget
                    ),
                ),
                _median(its, lambda curve: _first(curve.examples, curve.loss, target_loss))
                / base_to_loss,
                _median(its, _step) / base_step,
                _median(its, lambda curve: _first(curve.seconds, curve.loss, target_loss))
                / base_seconds,
                _median(its_slow, lambda curve: _first(curve.seconds, curve.loss, target_loss))
                / base_slow,
                _median(its_apart, lambda curve: curve.bytes[-1] / curve.run.steps),
                _median(its, lambda curve: curve.distance),
                _median(its, lambda curve: curve.disagreement),
            )
        )
    return rows


def _median(curves: Sequence[Curve], value: object) -> float:
    assert callable(value)
    values = [value(curve) for curve in curves]
    return median(values) if values else math.nan


def _reached(values: Sequence[float]) -> float:
    last = [each if math.isfinite(each) else math.inf for each in values[-_LAST:]]
    return median(last)


def _step(curve: Curve) -> float:
    return curve.seconds[-1] / curve.examples[-1]


def _until(curve: Curve, examples: int, values: Sequence[float]) -> list[float]:
    return [value for value, had in zip(values, curve.examples, strict=True) if had <= examples]


def _first(places: Sequence[float], values: Sequence[float], target: float) -> float:
    """Where the values have come down to a target, between two snapshots if need be."""
    before: tuple[float, float] | None = None
    for place, value in zip(places, values, strict=True):
        if value <= target:
            if before is None or not math.isfinite(before[1]):
                return float(place)
            share = (before[1] - target) / (before[1] - value)
            return before[0] + share * (place - before[0])
        before = place, value
    return math.inf

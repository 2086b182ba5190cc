"""From curves to figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ringdl.compare._policies import BASE
from ringdl.compare._run import LAST, Curve

_MARGIN = 0.02
"""Of how far the base's loss comes down. Near its end a curve is flat, and which of two runs is
first at exactly the same loss is chance."""


@dataclass(frozen=True)
class Row:
    """A policy beside gradients that are averaged in each step, for one task on so many ranks.

    Medians over seeds, each beside the base of that seed; infinite where it is not reached.

    Args:
        policy: its name.
        rate: the best learning rate.
        rate_is_at_end: of those that were tried, so another one may be better.
        loss: after as many examples as the base has had.
        accuracy: the same; then the lowest and the highest of all seeds.
        examples: to the base's accuracy, but for 0.01, as a share of all that it has had.
        to_loss: examples to the base's loss, but for 2% of how far that comes down, as a share of
            its own; so are the next three.
        step: seconds of a step.
        seconds: to that loss.
        slow_seconds: the same, with a slow rank in both.
        bytes: that each rank sends in a step, where ranks share no memory.
        distance: of parameters from the base's.
        disagreement: of guesses from the base's.
    """

    policy: str
    rate: float
    rate_is_at_end: bool
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
    return _reached(curve, curve.loss, curve.examples[-1])


def best_rates(curves: Sequence[Curve]) -> dict[str, float]:
    """For each policy, the rate with the lowest loss in the end: the median over seeds."""
    scores: dict[str, dict[float, list[float]]] = {}
    for curve in curves:
        its = scores.setdefault(curve.run.policy, {})
        its.setdefault(curve.run.rate, []).append(score(curve))
    best = {}
    for policy, its in scores.items():
        medians = {rate: median(each) for rate, each in its.items()}
        best[policy] = min(medians, key=medians.__getitem__)
    return best


def summarize(
    curves: Sequence[Curve],
    slowed: Sequence[Curve],
    apart: Sequence[Curve],
    at_end: Collection[str] = (),
) -> list[Row]:
    """A row for each policy.

    Args:
        curves: of all seeds, of one task on so many ranks, each at the policy's best rate; the
            base's half as long as the others.
        slowed: the same with a slow rank.
        apart: of ranks that share no memory.
        at_end: policies whose best rate is the lowest or the highest that was tried.
    """
    base = {curve.run.seed: curve for curve in curves if curve.run.policy == BASE}
    slow_base = {curve.run.seed: curve for curve in slowed if curve.run.policy == BASE}
    step = (
        median(curve.examples[-1] / curve.run.steps for curve in apart if curve.run.policy == BASE)
        if apart
        else math.nan
    )
    rows = []
    for policy in dict.fromkeys(curve.run.policy for curve in curves):
        its = [curve for curve in curves if curve.run.policy == policy]
        beside = [(curve, base[curve.run.seed]) for curve in its]
        slow = [
            (curve, slow_base[curve.run.seed]) for curve in slowed if curve.run.policy == policy
        ]
        sent = [step * curve.bytes_per_example for curve in apart if curve.run.policy == policy]
        accuracies = [_reached(each, each.accuracy, by.examples[-1]) for each, by in beside]
        rows.append(
            Row(
                policy,
                its[0].run.rate,
                policy in at_end,
                median(_reached(each, each.loss, by.examples[-1]) for each, by in beside),
                (median(accuracies), min(accuracies), max(accuracies)),
                median(_to_accuracy(each, by) / by.examples[-1] for each, by in beside),
                median(_to_loss(each, by, "examples") for each, by in beside),
                median(_step(each) / _step(by) for each, by in beside),
                median(_to_loss(each, by, "seconds") for each, by in beside),
                median(_to_loss(each, by, "seconds") for each, by in slow) if slow else math.nan,
                median(sent) if sent else math.nan,
                median(curve.distance for curve in its),
                median(curve.disagreement for curve in its),
            )
        )
    return rows


def _reached(curve: Curve, values: Sequence[float], examples: int) -> float:
    """The median in the last part of so many examples, or the last snapshot before."""
    until = [
        (had, value if math.isfinite(value) else math.inf)
        for value, had in zip(values, curve.examples, strict=True)
        if had <= examples
    ]
    last = [value for had, value in until if had > examples * (1 - LAST)]
    return median(last or [until[-1][1]])


def _to_accuracy(curve: Curve, base: Curve) -> float:
    target = _reached(base, base.accuracy, base.examples[-1]) - 0.01
    return _first(curve.examples, [-value for value in curve.accuracy], -target)


def _to_loss(curve: Curve, base: Curve, of: Literal["examples", "seconds"]) -> float:
    """As a share of what the base took to the loss that it ends with, but for a margin."""
    end = _reached(base, base.loss, base.examples[-1])
    target = end + _MARGIN * (base.loss[0] - end)
    its, theirs = getattr(curve, of), getattr(base, of)
    return _first(its, curve.loss, target) / _first(theirs, base.loss, target)


def _step(curve: Curve) -> float:
    return curve.seconds[-1] / curve.examples[-1]


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

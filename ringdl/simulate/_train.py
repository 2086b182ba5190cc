"""A training step: gradients become ready one after the other, and their buckets are averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringdl import _engine
from ringdl.simulate._cluster import Cluster, Prediction, predict

BACKWARD_SHARE = 2 / 3
"""Of computing: twice as many operations as forward."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        compute: seconds of computing alone.
        averaging: of its buckets.
        seconds: from its begin until gradients are averaged.
    """

    compute: float
    averaging: Prediction

    @property
    def seconds(self) -> float:
        return max(self.compute, self.averaging.seconds)

    @property
    def efficiency(self) -> float:
        """How much of what so many ranks compute alone they compute together."""
        return self.compute / self.seconds

    @property
    def limited_by(self) -> str:
        if self.efficiency > 0.99:
            return "computing"
        busy = max(self.averaging.busiest_seconds, self.averaging.link_busy_seconds)
        return "the last bucket" if busy < self.compute else self.averaging.limited_by


def buckets_of(counts: Sequence[int], compute: float, bucket_bytes: int) -> list[tuple[int, float]]:
    """The buckets of a step as ringdl makes them: bytes, and when each is ready, in seconds.

    Backward takes two thirds of computing. Gradients become ready in reverse order, at equal
    intervals, as layers take about as long as each other, however many parameters they have.

    Args:
        counts: elements of each gradient, of float32, in the model's order.
        compute: seconds of a step of one rank, forward and backward.
        bucket_bytes: as of `ringdl.Buckets`.
    """
    dtype = _engine.DType.float32
    specs: list[tuple[str, list[int], _engine.DType, list[int]]] = [
        (str(i), [count], dtype, []) for i, count in enumerate(counts)
    ]
    plan = _engine.plan_buckets(specs, bucket_bytes, min(bucket_bytes, 1 << 20))
    begin = compute * (1 - BACKWARD_SHARE)
    interval = compute * BACKWARD_SHARE / len(counts)
    buckets: list[tuple[int, float]] = []
    for gradients in plan:
        byte_count = sum((4 * counts[i] + 63) // 64 * 64 for i in gradients) + 4 * len(gradients)
        last = len(counts) - min(gradients)  # counted from the last gradient, which is ready first
        buckets.append((byte_count, begin + interval * last))
    return sorted(buckets, key=lambda bucket: bucket[1])


def predict_step(cluster: Cluster, buckets: Sequence[tuple[int, float]], compute: float) -> Step:
    """Simulate a step; see `buckets_of`."""
    if cluster.ranks == 1:
        return Step(compute, Prediction(0.0, 0.0, 0.0, 0, 0.0, 0, []))
    return Step(compute, predict(cluster, buckets))

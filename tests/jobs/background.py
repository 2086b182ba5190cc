"""Buckets that nobody waits for complete while the ranks compute.

Prints a line "HOW SECONDS" per way to compute: the median over some rounds of the time from the
last rank's launch to the moment when the average was in every rank's view.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

import ringdl

ROUNDS = 5
ELEMENTS = 1 << 18
MATRIX = np.ones((300, 300), np.float32)


def loop() -> None:
    for _ in range(20_000):
        pass


def multiply() -> None:
    MATRIX @ MATRIX


def hold_the_gil() -> None:
    sum(range(1_000_000))


def seconds_until_averaged(buckets: ringdl.Buckets, compute: Callable[[], object]) -> float:
    (view,) = buckets.views()
    average = np.mean(4.0 ** np.arange(ringdl.size()))  # which no rank's own value is
    ringdl.barrier()
    view[:] = 4.0 ** ringdl.rank()
    buckets.ready(0)
    launched = time.monotonic()
    while not np.allclose(view, average) and time.monotonic() < launched + 5:
        compute()
    ended = time.monotonic()
    buckets.wait()
    assert np.allclose(view, average)
    times = ringdl.allgather(np.array([[launched, ended]]))
    return float(times[:, 1].max() - times[:, 0].max())


def main() -> None:
    ringdl.init()
    buckets = ringdl.Buckets([("w", (ELEMENTS,), "float32")])
    ways = (loop, multiply, hold_the_gil, lambda: time.sleep(0.02))
    for way, name in zip(ways, ("loop", "multiply", "hold_the_gil", "sleep"), strict=True):
        seconds = [seconds_until_averaged(buckets, way) for _ in range(ROUNDS)]
        if ringdl.rank() == 0:
            sys.stdout.write(f"{name} {np.median(seconds):.4f} (of {np.round(seconds, 4)})\n")


if __name__ == "__main__":
    main()

"""How much of a core a rank takes, all its threads together, while it waits or does nothing.

Prints a line "KIND RANK SHARE" per wait and rank; rank 1 is the late one, and idle meanwhile.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

import ringdl

SECONDS = {"allreduce": 10, "barrier": 2, "broadcast": 2, "buckets": 2}


def measured(late_seconds: float, wait: Callable[[], object]) -> float:
    """CPU seconds per second, of this process, until all ranks have arrived."""
    ringdl.barrier()
    time.sleep(0.2)  # what the barrier left behind is over
    cpu, begin = time.process_time(), time.monotonic()
    if ringdl.rank() == 1:
        time.sleep(late_seconds)
        return (time.process_time() - cpu) / (time.monotonic() - begin)
    wait()
    return (time.process_time() - cpu) / (time.monotonic() - begin)


def main() -> None:
    ringdl.init()
    x = np.ones(1 << 20, np.float32)
    buckets = ringdl.Buckets([("w", (1 << 20,), "float32")])
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: ringdl.allreduce_(x, name="x"),
        "barrier": lambda: ringdl.barrier(name="x"),
        "broadcast": lambda: ringdl.broadcast_(x, name="x"),
        "buckets": buckets.wait,
    }
    for kind, call in calls.items():
        share = measured(SECONDS[kind], call)
        if ringdl.rank() == 1:
            call()
        sys.stdout.write(f"{'idle' if ringdl.rank() == 1 else kind} {ringdl.rank()} {share:.5f}\n")


if __name__ == "__main__":
    main()

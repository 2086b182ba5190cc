"""init() and shutdown() again and again: what a process holds must not grow.

    rounds.py ROUNDS [WARM_UP]

Prints a line of JSON per rank: threads, file descriptors and KiB of memory, after WARM_UP rounds
(10) and after all.
"""

import json
import sys

import numpy as np
from measure import held

import ringdl


def one_round(number: int) -> None:
    ringdl.init()
    total = ringdl.allreduce(np.full(20_000, number, np.float32), ringdl.Sum)
    assert total[-1] == number * ringdl.size()
    buckets = ringdl.Buckets([("w", (10_000,), "float32")])
    buckets.ready(0)
    work = ringdl.allreduce_async(np.ones(3), name="dropped")
    assert buckets.wait() == [True]
    del work
    ringdl.shutdown()


def main(rounds: int, warm_up: int) -> None:
    for number in range(warm_up):
        one_round(number)
    before = held()
    for number in range(rounds - warm_up):
        one_round(number)
    sys.stdout.write(json.dumps([before, held()]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int([*sys.argv, 10][2]))

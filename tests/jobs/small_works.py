"""A great many small works: nothing of them may stay.

    small_works.py WORKS [WARM_UP]

In turn: unnamed, with one of a few names that recur, asynchronous in flights, and dropped before
they end. Prints a line of JSON per rank, what the process holds after WARM_UP works (50,000) and in
the end; then rank 0 says how many works there were each second.
"""

import json
import os
import signal
import sys
import time

import numpy as np
from measure import held

import ringdl

NAMES = [f"name {i}" for i in range(16)]
FLIGHT = 40  # works of one flight, each


def flights(works: int, x: np.ndarray) -> None:
    for number in range(works // FLIGHT):
        if number % 4 == 0:
            for _ in range(FLIGHT):
                ringdl.allreduce_(x)
        elif number % 4 == 1:
            for i in range(FLIGHT):
                ringdl.allreduce_(x, name=NAMES[i % len(NAMES)])
        elif number % 4 == 2:
            started = [ringdl.allreduce_async(x) for i in range(FLIGHT)]
            for work in started:
                work.wait()
        else:
            for i in range(FLIGHT):
                ringdl.allreduce_async(x, name=NAMES[i % len(NAMES)])
            ringdl.barrier()


def flood(x: np.ndarray) -> None:
    """Stop each rank once while another sends: MPI's pools hold what a rank has not looked at."""
    processes = ringdl.allgather(np.array([os.getpid()])).tolist()
    for stopped, process in enumerate(processes):
        ringdl.barrier()
        if ringdl.rank() == (stopped + 1) % ringdl.size():
            os.kill(process, signal.SIGSTOP)
        works = [ringdl.allreduce_async(x) for _ in range(4 * FLIGHT)]
        if ringdl.rank() == (stopped + 1) % ringdl.size():
            time.sleep(0.1)
            os.kill(process, signal.SIGCONT)
        for work in works:
            work.wait()


def main(works: int, warm_up: int) -> None:
    ringdl.init()
    x = np.full(1, ringdl.rank(), np.float32)
    flood(x)
    flights(warm_up, x)
    before, begin = held(), time.monotonic()
    flights(works - warm_up, x)
    seconds = time.monotonic() - begin
    ringdl.barrier()
    sys.stdout.write(json.dumps([before, held()]) + "\n")
    if ringdl.rank() == 0:
        sys.stdout.write(f"{(works - warm_up) / seconds:,.0f} works/s\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int([*sys.argv, 50_000][2]))

"""Hours of everything at once, on all ranks: do results stay right, and does nothing grow?

    python -m ringdl run -n 2 tests/soak.py --minutes 60        (make soak)

Works of random kinds, dtypes, sizes and names, in flights that each rank submits in its own order,
waited for or dropped; buckets with missing gradients; objects; messages; groups of arrays and of
ranks; ranks that join; mismatches and timeouts made on purpose (`soaking.works`). Training by each
policy, in NumPy and PyTorch; commits and checkpoints, loaders, cut networks (`soaking.training`).
Lives of a communicator follow one another; the flight recorder is on. Ranks draw the same random
numbers, so that they agree without talking. After each life one line: works per second, and for
each rank what it holds without a communicator: memory (MiB resident; beside it what it was at the
end of the life, which depends on how much was done in it), file descriptors and threads.

Exit code 1 if a result is wrong (with a traceback), or if after the warm-up (a third of the time,
at most 5 minutes) a line fitted through a rank's memory without a communicator rises by more than 1
MiB in 10 minutes and twice its standard error (runs of under 4 minutes are too short to tell), or a
rank has more file descriptors or threads in the end.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from jobs.measure import held
from soaking.training import Training
from soaking.works import Works

import ringdl

LIFE_SECONDS = 60  # a communicator that has seen a mismatch is never freed, and MPICH has 2,048
LIVES = 6  # at least
MIB_PER_10_MINUTES = 1.0
LEAST_POINTS, LEAST_SECONDS = 5, 240  # of a line


def figures() -> list[float]:
    """MiB resident, files, threads."""
    mine = held()
    return [mine["rss"] / 1024, mine["files"], mine["threads"]]


def fitted_slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Of the least-squares line, with its standard error."""
    slope, offset = np.polyfit(x, y, 1)
    spread = np.sum((y - slope * x - offset) ** 2) / (len(x) - 2)
    return float(slope), float(np.sqrt(spread / np.sum((x - x.mean()) ** 2)))


def growths(seconds: np.ndarray, rows: np.ndarray) -> list[str]:
    """What has grown. `rows`: of each moment, for each rank, what `figures` gives."""
    found = []
    for rank in range(rows.shape[1]):
        if len(rows) >= LEAST_POINTS and seconds[-1] >= LEAST_SECONDS:
            slope, error = fitted_slope(seconds / 600, rows[:, rank, 0])
            print(f"rank {rank}: memory changes by {slope:+.2f} ± {error:.2f} MiB in 10 minutes")
            if slope - 2 * error > MIB_PER_10_MINUTES:
                found.append(f"memory of rank {rank}")
        for column, what in ((1, "file descriptors"), (2, "threads")):
            if rows[-1, rank, column] > rows[0, rank, column]:
                found.append(f"{what} of rank {rank}")
    return found


class Life:
    """Of a communicator: what is done in it."""

    def __init__(self, random: np.random.Generator, folder: Path) -> None:
        self._random = random
        self._parts = Works(random, folder), Training(random, folder)
        actions = {do: often for part in self._parts for do, often in part.actions().items()}
        self._actions = [*actions]
        self._shares = np.array([*actions.values()]) / sum(actions.values())

    def step(self) -> None:
        self._actions[self._random.choice(len(self._actions), p=self._shares)]()

    def done(self) -> int:
        return sum(part.done for part in self._parts)


def run(arguments: argparse.Namespace, own: Path) -> tuple[int, list[float], list[np.ndarray], int]:
    """The rank, for each life when it had ended and what ranks held then, and how many works."""
    random = np.random.default_rng(arguments.seed)
    begin = time.monotonic()
    life_seconds = min(LIFE_SECONDS, 60 * arguments.minutes / LIVES)
    seconds: list[float] = []
    rows: list[np.ndarray] = []
    works = 0
    is_over = False
    while not is_over:
        ringdl.init()
        made = time.monotonic()
        life = Life(random, ringdl.broadcast_object(own))
        is_old = False
        while not is_old:
            for _ in range(20):
                life.step()
            now = time.monotonic()
            is_over = now - begin > 60 * arguments.minutes
            is_over, is_old = ringdl.broadcast_object((is_over, now - made > life_seconds))
            is_old |= is_over
        done, lived = life.done(), time.monotonic() - made
        del life
        while ringdl.stats()["works_in_flight"] > 0:
            time.sleep(0.01)
        ringdl.barrier()  # lets go of the arrays
        in_use = held()["rss"] / 1024
        ringdl.shutdown()
        mine = np.array([[*figures(), in_use]])
        ringdl.init()
        rows.append(ringdl.allgather(mine))
        rank = ringdl.rank()
        ringdl.shutdown()
        works += done
        seconds.append(time.monotonic() - begin)
        if rank == 0:
            report(seconds[-1], done / lived, rows[-1])
    return rank, seconds, rows, works


def report(seconds: float, rate: float, rows: np.ndarray) -> None:
    memory, files, threads, in_use = (
        " ".join(f"{x:.{digits}f}" for x in column)
        for column, digits in zip(rows.T, (1, 0, 0, 1), strict=True)
    )
    print(
        f"{seconds:6.0f} s: {rate:6,.0f} works/s; MiB {memory} (before {in_use}); files {files}; "
        f"threads {threads}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        os.environ["RINGDL_FLIGHT_RECORDER"] = own
        rank, seconds, rows, works = run(arguments, Path(own))
    if rank > 0:
        return 0
    warm = min(300, seconds[-1] / 3)
    later = [i for i in range(len(rows)) if seconds[i] >= warm]
    grown = growths(np.array(seconds)[later], np.array(rows)[later])
    print(f"{works:,} works; " + (f"grown: {', '.join(grown)}" if grown else "nothing has grown"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

"""Hours of everything at once, on all ranks: do results stay right, and does nothing grow?

    python -m ringdl run -n 2 tests/soak.py --minutes 60        (make soak)

Works of random kinds, dtypes, sizes and names, in flights that each rank submits in its own order,
waited for or dropped; buckets with missing gradients; objects; mismatches and timeouts made on
purpose; a new communicator now and then. Ranks draw the same random numbers, so that they agree
without talking. Every 30 s one line: works per second, and for each rank memory (MiB resident, and
its share of what is shared), file descriptors and threads.

Exit code 1 if a result is wrong (with a traceback), or if after the warm-up (a third of the time,
at most 5 minutes) a line fitted through a rank's resident memory rises by more than 1 MiB in 10
minutes and twice its standard error (runs of under 4 minutes are too short to tell), or a rank has
more file descriptors or threads in the end.
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
from jobs.measure import held

import ringdl

REPORT_SECONDS = 30
COMMUNICATOR_SECONDS = 60  # one that has seen a mismatch is never freed, and MPICH has 2,048
MIB_PER_10_MINUTES = 1.0
LEAST_POINTS = 5  # of a line
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
SHAPES = {"w": (300, 200), "b": (200,), "v": (70_000,), "c": (7,)}


class Soak:
    """One life of a communicator: its actions, and what they share."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.rank, self.size = ringdl.rank(), ringdl.size()
        specs = [(name, shape, "float32") for name, shape in SHAPES.items()]
        self.buckets = ringdl.Buckets(specs, bucket_bytes=200_000, op=ringdl.Sum)
        self.works = 0

    def length(self, largest: int = 1 << 19) -> int:
        return int(np.exp(self.random.uniform(0, np.log(largest))))

    def name(self) -> str | None:
        number = int(self.random.integers(0, 60))
        return f"name {number}" if number < 30 else None

    def array(self, length: int) -> np.ndarray:
        return np.full(length, 1 + self.rank % 3, self.random.choice(DTYPES))

    def total(self) -> int:
        return sum(1 + rank % 3 for rank in range(self.size))

    def check_sum(self, result: np.ndarray) -> None:
        assert (result == result.dtype.type(self.total())).all(), (result, self.total())
        self.works += 1

    def allreduce(self) -> None:
        self.check_sum(ringdl.allreduce(self.array(self.length()), ringdl.Sum, self.name()))

    def small_works(self) -> None:
        for _ in range(100):
            self.check_sum(ringdl.allreduce(self.array(self.length(8)), ringdl.Sum, self.name()))

    def flight(self) -> None:
        """Named works in another order on each rank; some are never waited for."""
        arrays = [self.array(self.length(1 << 16)) for _ in range(self.random.integers(2, 40))]
        is_kept = self.random.random(len(arrays)) < 0.7
        order = np.random.default_rng(self.works + self.rank).permutation(len(arrays))
        works = {i: ringdl.allreduce_async_(arrays[i], ringdl.Sum, f"flight {i}") for i in order}
        for i in range(len(arrays)):
            if not is_kept[i]:
                del works[i]
        for work in works.values():
            self.check_sum(work.wait())
        self.works += len(arrays) - len(works)

    def gather(self) -> None:
        length = self.length(1 << 14)
        parts = ringdl.allgather(np.full((length + self.rank, 3), self.rank), self.name())
        ends = np.cumsum([length + rank for rank in range(self.size)])
        assert len(parts) == ends[-1]
        assert (parts[ends - 1, 0] == np.arange(self.size)).all()
        self.works += 1

    def broadcast(self) -> None:
        root = int(self.random.integers(self.size))
        x = ringdl.broadcast(np.full(self.length(), self.rank, np.int32), root, self.name())
        assert (x == root).all()
        thing = {"bytes": bytes(self.length(100_000)), "root": root}
        assert ringdl.broadcast_object(thing if self.rank == root else None, root) == thing
        ringdl.barrier(self.name())
        self.works += 4

    def bucket_rounds(self) -> None:
        for _ in range(5):
            missing = int(self.random.integers(-3, len(SHAPES)))
            missing_everywhere = self.random.random() < 0.5
            for i, view in enumerate(self.buckets.views()):
                if i != missing or (self.rank > 0 and not missing_everywhere):
                    view[...] = 1 + self.rank % 3
                    self.buckets.ready(i)
            produced = self.buckets.wait()
            for i, view in enumerate(self.buckets.views()):
                expected = self.total() - (i == missing)
                if i == missing and (missing_everywhere or self.size == 1):
                    expected = 0
                assert produced[i] == (expected > 0), (produced, missing)
                assert (view == expected).all(), (i, missing, view)
            self.works += 2

    def mismatch(self) -> None:
        wrong = int(self.random.integers(self.size))
        length = self.length(1 << 16)
        expect(
            ringdl.MismatchError,
            lambda: ringdl.allreduce(np.ones(length + (self.rank == wrong)), name=self.name()),
        )
        expect(
            ringdl.MismatchError,
            lambda: ringdl.Buckets([("w", (length + (self.rank == wrong),), "float32")]),
        )

    def wrong_name(self) -> None:
        x = np.ones(3)
        expect(ringdl.MismatchError, lambda: ringdl.allreduce(x, name=f"only on {self.rank}"))

    def timeout(self) -> None:
        """A rank comes only after the others have given up once."""
        late = int(self.random.integers(self.size))
        x = self.array(self.length(1 << 16))
        if self.rank == late:
            ringdl.barrier("given up")
            self.check_sum(ringdl.allreduce_(x, ringdl.Sum, "late"))
            return
        work = ringdl.allreduce_async_(x, ringdl.Sum, "late")
        expect(ringdl.StallError, lambda: work.wait(timeout=0.02))
        ringdl.barrier("given up")
        self.check_sum(work.wait())

    def step(self) -> None:
        actions: dict[Callable[[], None], int] = {
            self.allreduce: 100,
            self.small_works: 20,
            self.flight: 60,
            self.gather: 40,
            self.broadcast: 40,
            self.bucket_rounds: 40,
        }
        if self.size > 1:
            actions |= {self.mismatch: 10, self.timeout: 10, self.wrong_name: 0.1}
        shares = np.array(list(actions.values())) / sum(actions.values())
        list(actions)[self.random.choice(len(actions), p=shares)]()


def expect(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def figures() -> np.ndarray:
    """MiB resident, MiB of its share, files, threads; a row per rank."""
    while ringdl.stats()["works_in_flight"] > 0:
        time.sleep(0.01)
    ringdl.barrier()  # lets go of the arrays
    mine = held()
    row = [mine["rss"] / 1024, mine["pss"] / 1024, mine["files"], mine["threads"]]
    return ringdl.allgather(np.array([row]))


def fitted_slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Of the least-squares line, with its standard error."""
    slope, offset = np.polyfit(x, y, 1)
    spread = np.sum((y - slope * x - offset) ** 2) / (len(x) - 2)
    return float(slope), float(np.sqrt(spread / np.sum((x - x.mean()) ** 2)))


def growths(seconds: np.ndarray, rows: np.ndarray) -> list[str]:
    """What has grown. `rows`: of each moment, for each rank, what `figures` gives."""
    found = []
    for rank in range(rows.shape[1]):
        if len(rows) >= LEAST_POINTS:
            slope, error = fitted_slope(seconds / 600, rows[:, rank, 0])
            print(f"rank {rank}: memory changes by {slope:+.2f} ± {error:.2f} MiB in 10 minutes")
            if slope - 2 * error > MIB_PER_10_MINUTES:
                found.append(f"memory of rank {rank}")
        for column, what in ((2, "file descriptors"), (3, "threads")):
            if rows[-1, rank, column] > rows[0, rank, column]:
                found.append(f"{what} of rank {rank}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    random = np.random.default_rng(arguments.seed)
    begin = time.monotonic()
    seconds, rows, works, reported = [0.0], [], 0, 0
    is_over = False
    while not is_over:
        ringdl.init()
        soak = Soak(random)
        made = time.monotonic()
        is_old = False
        while not is_old:
            for _ in range(20):
                soak.step()
            now = time.monotonic()
            is_over = now - begin > 60 * arguments.minutes
            is_due = is_over or now - begin > REPORT_SECONDS * (len(rows) + 1)
            is_old = is_over or now - made > COMMUNICATOR_SECONDS
            is_over, is_due, is_old = ringdl.broadcast_object((is_over, is_due, is_old))
            if is_due:
                rows.append(figures())
                done = works + soak.works
                if soak.rank == 0:
                    rate = (done - reported) / (now - begin - seconds[-1])
                    columns = [" ".join(f"{x:.1f}" for x in column) for column in rows[-1].T[:2]]
                    columns += [" ".join(f"{x:.0f}" for x in column) for column in rows[-1].T[2:]]
                    print(
                        f"{now - begin:6.0f} s: {rate:6,.0f} works/s; MiB {columns[0]} (share "
                        f"{columns[1]}); files {columns[2]}; threads {columns[3]}",
                        flush=True,
                    )
                seconds.append(now - begin)
                reported = done
        works += soak.works
        rank = soak.rank
        del soak
        ringdl.shutdown()
    if rank > 0:
        return 0
    warm = min(300, seconds[-1] / 3)
    later = [i for i in range(len(rows)) if seconds[i + 1] >= warm]
    grown = growths(np.array(seconds[1:])[later], np.array(rows)[later])
    print(f"{works:,} works; " + (f"grown: {', '.join(grown)}" if grown else "nothing has grown"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

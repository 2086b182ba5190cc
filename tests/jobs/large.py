"""Every collective on more than 2^31 elements, on two ranks, checked in slices.

Prints the seconds that each took. Needs about 9 GiB of memory.
"""

import time
from collections.abc import Iterator

import numpy as np

import ringdl

COUNT = 2**31 + 12345
SLICE = 1 << 24

ringdl.init()
rank, size = ringdl.rank(), ringdl.size()


def filled(count: int, seed: int) -> np.ndarray:
    """Bytes that tell where they belong; their period is prime, so a shift shows."""
    pattern = (np.arange(251) + seed).astype(np.int8) % 61
    return np.resize(pattern, count)


def slices(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for begin in range(0, len(array), SLICE):
        yield begin, array[begin : begin + SLICE]


def check(array: np.ndarray, seeds: list[int], begin: int = 0) -> None:
    """The elements are the sums of those that `filled` makes of the seeds, from `begin` on."""
    period = sum(filled(251, seed) for seed in seeds)
    for at, part in slices(array):
        expected = np.resize(np.roll(period, -((begin + at) % 251)), len(part))
        assert np.array_equal(part, expected), f"wrong in the slice at {at}"


def timed(what: str, begin: float) -> None:
    ringdl.barrier()
    if rank == 0:
        print(f"{what}: {time.monotonic() - begin:.1f} s", flush=True)


def main() -> None:
    x = filled(COUNT, rank)
    begin = time.monotonic()
    assert ringdl.allreduce_(x, ringdl.Sum) is x
    timed("allreduce_", begin)
    check(x, list(range(size)))
    x = filled(COUNT, rank)

    begin = time.monotonic()
    part = ringdl.reducescatter(x, ringdl.Sum)
    timed("reducescatter", begin)
    rows = COUNT // size + (rank < COUNT % size)
    assert len(part) == rows
    check(part, list(range(size)), rank * (COUNT // size) + min(rank, COUNT % size))

    begin = time.monotonic()
    part = ringdl.scatter(x, 0, [COUNT - 5, 5])
    timed("scatter", begin)
    assert len(part) == (COUNT - 5, 5)[rank]
    check(part, [0], 0 if rank == 0 else COUNT - 5)

    begin = time.monotonic()
    part = ringdl.alltoall(x, [5, COUNT - 5] if rank == 0 else [7, COUNT - 7])[0]
    timed("alltoall", begin)
    if rank == 1:
        check(part[: COUNT - 5], [0], 5)
        check(part[COUNT - 5 :], [1], 7)
    del part

    begin = time.monotonic()
    if rank == 0:
        ringdl.send(x, 1)
    else:
        ringdl.recv_(x, 0)
    timed("send", begin)
    check(x, [0])

    x = filled(COUNT, rank)
    begin = time.monotonic()
    ringdl.broadcast_(x, 1)
    timed("broadcast_", begin)
    check(x, [1])
    half = x[: COUNT // 2 + 1]

    begin = time.monotonic()
    whole = ringdl.allgather(half)
    timed("allgather", begin)
    assert len(whole) > 2**31
    for r in range(size):
        check(whole[r * len(half) : (r + 1) * len(half)], [1])
    del whole

    begin = time.monotonic()
    collected = ringdl.gather(half, 1)
    timed("gather", begin)
    if collected is not None:
        check(collected[len(half) :], [1])
    print("all right", flush=True)


main()

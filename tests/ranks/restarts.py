"""The end of a communicator, and the next one; groups; threads and files."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ringdl
from tests.ranks._outside import world
from tests.ranks.support import bits, expect, needs


def _threads_and_files() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def check_again_and_again() -> None:
    """init -> shutdown -> init; threads and file descriptors do not grow."""
    before = _threads_and_files()
    first = None
    for i in range(10):
        ringdl.shutdown()
        ringdl.shutdown()
        assert not ringdl.is_initialized()
        with expect(ringdl.UsageError, "ringdl.init()"):
            ringdl.rank()
        comm = ringdl.init()
        assert ringdl.init() is comm, "a second time changes nothing"
        assert (ringdl.rank(), ringdl.size()) == (world.rank, world.size)
        assert ringdl.allreduce(np.full(50_000, i), ringdl.Sum)[0] == i * ringdl.size()
        buckets = ringdl.Buckets([("w", (10_000,), "float32")])
        buckets.ready(0)
        assert buckets.wait() == [True]
        del buckets
        first = first or _threads_and_files()
    after = _threads_and_files()
    # A thread of the check before may have ended in the first turn, so there may be fewer.
    grown = any(now > then for now, then in zip(after, before, strict=True))
    assert not grown, f"threads and files were {before}, are {after}"
    assert after == first, f"threads and files were {first} after the first turn, are {after}"


def check_nothing_goes_on_before_init() -> None:
    old = ringdl.get_communicator()
    buckets = ringdl.Buckets([("w", (10,), "float32")])
    work = ringdl.allreduce_async(np.ones(3), ringdl.Sum)
    ringdl.shutdown()  # waits for what is in flight
    assert work.done()
    assert work.wait()[0] == old.size
    calls: list[Callable[[], object]] = [
        old.barrier,
        lambda: old.allreduce(np.ones(2)),
        lambda: old.allgather(np.ones(2)),
        lambda: old.broadcast(np.ones(2)),
        lambda: buckets.ready(0),
    ]
    for call in calls:
        with expect(ringdl.UsageError, "shut down"):
            call()
    ringdl.init()
    ringdl.barrier()


@needs(ranks=2)
def check_who_left_is_named() -> None:
    """Who waits for a rank that has shut down is told so, soon."""
    for leaver in {0, ringdl.size() - 1}:
        name = f"after rank {leaver} left"
        if ringdl.rank() != leaver:
            with expect(
                ringdl.MismatchError, f"rank {leaver} has shut down", f"'{name}'", within=5.0
            ):
                ringdl.allreduce(np.ones(3), name=name)
        ringdl.shutdown()
        ringdl.init()
    ringdl.barrier()


@needs(ranks=2)
def check_who_left_is_named_by_buckets() -> None:
    buckets = ringdl.Buckets([("w", (1000,), "float32")])
    buckets.wait()
    if ringdl.rank() == 0:
        time.sleep(0.2)
    else:
        with expect(ringdl.MismatchError, "rank 0 has shut down", within=5.0):
            buckets.wait()
    ringdl.shutdown()
    ringdl.init()
    ringdl.barrier()


@needs(ranks=2)
def check_nothing_is_left_for_the_next_one() -> None:
    """A message that a rank sent to one that left is not taken for one of the next communicator."""
    for i in range(6):
        buckets = ringdl.Buckets([("w", (3000,), "float32")], op=ringdl.Sum)
        for round_number in range(3):
            buckets.views()[0][...] = i + round_number
            buckets.ready(0)
            assert buckets.wait() == [True]
            assert (buckets.views()[0] == ringdl.size() * (i + round_number)).all()
        if ringdl.rank() != i % ringdl.size():
            buckets.views()[0][...] = -1
            with contextlib.suppress(ringdl.MismatchError):  # if it has heard of it already
                buckets.ready(0)
        ringdl.shutdown()
        ringdl.init()


def check_shutdown_waits_for_late_ranks() -> None:
    """A late rank still gets what the others have submitted, though they are ending."""
    size, rank = ringdl.size(), ringdl.rank()
    if rank == 0:
        time.sleep(0.5)
    array = np.full(100_000, rank, np.int64)
    work = ringdl.allreduce_async_(array, ringdl.Sum)
    if rank == 0:
        assert work.wait()[-1] == size * (size - 1) // 2
    ringdl.shutdown()
    assert array[-1] == size * (size - 1) // 2
    ringdl.init()


@needs(ranks=2, mpi=True)
def check_groups() -> None:
    """A communicator of some of the ranks, in another order."""
    from mpi4py import MPI

    ringdl.shutdown()
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    group = MPI.COMM_WORLD.Split(color=rank % 2, key=-rank)
    comm = ringdl.init(group)
    assert (comm.rank, comm.size) == (group.rank, group.size)
    members = [r for r in range(size) if r % 2 == rank % 2]
    assert ringdl.allreduce(np.array([rank]), ringdl.Sum).item() == sum(members)
    assert ringdl.allgather(np.array([rank])).tolist() == members[::-1]
    ringdl.shutdown()
    group.Free()
    ringdl.init()
    assert ringdl.size() == size


def check_forked_child_is_refused() -> None:
    """A DataLoader's worker gets a clear error, and its end harms nobody."""
    buckets = ringdl.Buckets([("w", (10,), "float32")])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = b"no error"
        try:
            ringdl.barrier()
        except ringdl.UsageError as error:
            text = str(error).encode()
        del buckets
        os.write(writing, text)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert "forked" in message, message
    buckets.ready(0)
    assert buckets.wait() == [True]


def check_same_bits_after_restart() -> None:
    """The same numbers for the same ranks, from one communicator to the next."""
    mine = np.random.default_rng(ringdl.rank()).random(40_000, np.float32)
    digests = set()
    for _ in range(3):
        digests.add(bits(ringdl.allreduce(mine)))
        ringdl.shutdown()
        ringdl.init()
    assert len(digests) == 1


def check_the_thread_that_waits_may_be_another() -> None:
    results = []
    work = ringdl.allreduce_async(np.ones(50_000), ringdl.Sum)
    thread = threading.Thread(target=lambda: results.append(work.wait()))
    thread.start()
    thread.join()
    assert results[0][0] == ringdl.size()

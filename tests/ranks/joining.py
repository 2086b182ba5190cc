"""Ranks that have nothing to do any more, while others go on."""

from __future__ import annotations

import time

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.support import assert_same_bits, expect, needs


def rounds_of(rank: int) -> int:
    return 1 + rank % 3


def take_part(comm: Communicator, number: int, buckets: ringdl.Buckets) -> None:
    """One of each collective of the ranks that have a round of this number."""
    live = [rank for rank in range(comm.size) if rounds_of(rank) > number]
    total = sum(rank + 1 for rank in live)
    for count in (1, 3_000, 100_000):
        for name in (None, "named"):
            x = np.full(count, comm.rank + 1.0)
            assert (comm.allreduce(x, ringdl.Sum, name) == total).all()
        assert (comm.allreduce(np.full(count, comm.rank + 1.0)) == total / comm.size).all()
        assert (comm.allreduce(np.full(count, comm.rank), ringdl.Max) == live[-1]).all()
    work = comm.grouped_allreduce_async([np.ones(10), np.ones(100_000, np.float32)], ringdl.Sum)
    assert all((part == len(live)).all() for part in work.wait())
    assert comm.allgather(np.full((2, 3), comm.rank)).tolist() == [
        [rank] * 3 for rank in live for _ in range(2)
    ]
    assert comm.allgather_object({"rank": comm.rank}) == [{"rank": rank} for rank in live]
    root = live[-1]
    assert comm.broadcast_object({"from": comm.rank}, root) == {"from": root}
    rows = comm.alltoall(np.full((comm.size, 2), comm.rank))
    rows = rows[0] if isinstance(rows, tuple) else rows
    assert rows.tolist() == [[rank] * 2 for rank in live]
    scattered = comm.reducescatter(np.ones((2 * comm.size, 5)), ringdl.Sum)
    assert scattered.shape == (2, 5)
    assert (scattered == len(live)).all()
    comm.barrier()
    views = buckets.views()
    views[0][...] = comm.rank + 1
    buckets.ready(0)
    assert buckets.wait() == [True, False]
    assert np.allclose(views[0], total / comm.size, rtol=1e-6)


def check_each_collective(comm: Communicator) -> None:
    """Twice, and afterwards all ranks count alike."""
    buckets = ringdl.Buckets([("a", (70_000,), "float32"), ("b", (3,), "float32")], 4096)
    for _ in range(2):
        for number in range(rounds_of(comm.rank)):
            take_part(comm, number, buckets)
        last = comm.join()
        assert comm.allgather(np.array([last])).tolist() == [last] * comm.size
        most = max(map(rounds_of, range(comm.size)))
        assert last == max(rank for rank in range(comm.size) if rounds_of(rank) == most)
        x = np.random.default_rng(comm.rank).standard_normal(50_000)
        assert_same_bits(comm, comm.allreduce(x), comm.allreduce(x, name="after"))


def check_the_last_one(comm: Communicator) -> None:
    """Most works, then the highest rank."""
    for most in range(comm.size):
        for _ in range(1 + (comm.rank == most)):
            comm.allreduce(np.ones(3))
        assert comm.join() == most
    assert comm.join() == comm.size - 1


@needs(ranks=2)
def check_what_cannot_be_answered(comm: Communicator) -> None:
    """On all ranks that are left, in one sentence; nothing hangs."""
    x = np.ones(10)
    if comm.rank == 1:
        with expect(ringdl.StallError, "join() waits on rank 1"):
            comm.join(timeout=0.1)
        with expect(ringdl.UsageError, "has called join()"):
            comm.allreduce(x, name="mine")
    else:
        time.sleep(0.5)
        with expect(ringdl.UsageError, "rank 1 has joined", "cannot be the root of the"):
            comm.broadcast(x, 1)
        with expect(ringdl.UsageError, "rank 1 has joined", "cannot be the root of the"):
            comm.gather(x, 1)
        with expect(ringdl.UsageError, "has joined", "before any rank calls join()"):
            comm.split(0)
        with expect(ringdl.UsageError, "has joined", "before any rank calls join()"):
            ringdl.Grid(communicator=comm)
        with expect(ringdl.UsageError, "has joined", "before any rank calls join()"):
            ringdl.Buckets([("a", (3,), "float32")])
        if comm.rank == 0:
            with expect(ringdl.UsageError, "rank 1 has joined and neither sends nor receives"):
                comm.send(x, 1)
    comm.join()


@needs(ranks=3)
def check_groups(comm: Communicator) -> None:
    """Those of its groups are answered, and none but the communicator of all ranks joins."""
    pair = comm.group([0, 1])
    if pair is not None:
        with expect(ringdl.UsageError, "that this one was made from"):
            pair.join()
    if comm.rank == 1:
        assert pair is not None
        for _ in range(5):
            assert (pair.allreduce(np.ones(7), ringdl.Sum) == 1).all()
    if comm.rank == 2:
        comm.barrier()  # counts for more than what only some ranks do
    del pair  # is answered all the same
    assert comm.join() == 2


@needs(ranks=2)
def check_calls_that_fail_count_for_who_came_last(comm: Communicator) -> None:
    for first in (comm.size - 1, 0):
        if comm.rank != first:
            for _ in range(3):
                with expect(ringdl.UsageError, f"rank {first} has joined", within=5):
                    comm.broadcast(np.ones(2), first)
        last = comm.join()
        assert last == (comm.size - 2 if first == comm.size - 1 else comm.size - 1)
        comm.barrier()


@needs(ranks=2)
def check_only_allreduces_are_answered(comm: Communicator) -> None:
    """RINGDL_JOIN=allreduce."""
    comm._engine.set_join_answers_allreduces_only(True)
    for first in (comm.size - 1, 0):
        if comm.rank != first:
            total = comm.allreduce(np.ones(3), ringdl.Sum, "a")
            assert total.tolist() == [comm.size - 1] * 3
            calls = (
                lambda: comm.allgather(np.ones(2)),
                lambda first=first: comm.broadcast(np.ones(2), 0 if first else 1, "b"),
                lambda: comm.reducescatter(np.ones((comm.size, 1))),
                comm.barrier,
            )
            for call in calls:
                with expect(ringdl.UsageError, f"rank {first} has joined", "RINGDL_JOIN", within=5):
                    call()
        last = comm.join()
        assert last == (comm.size - 2 if first == comm.size - 1 else comm.size - 1)
        comm.barrier()
    comm._engine.set_join_answers_allreduces_only(False)

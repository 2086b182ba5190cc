"""Ranks that wait for one another in messages and groups: found soon, and only those are told."""

from __future__ import annotations

import time

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.support import busy, expect, needs, until

SOON = 5.0


def poll(comm: Communicator, source: int, name: str) -> None:
    """Take a message without ever waiting for it: who looks now and then is not blocked."""
    work = comm.recv_async_(np.zeros(1), source, name)
    assert until(work.done, 20.0), f"{name} has not arrived"
    work.wait()


def reuse(comm: Communicator, name: str | None = None) -> None:
    """The key works again at once, small and large."""
    for count in (3, 50_000):
        result = comm.allreduce(np.full(count, comm.rank), ringdl.Sum, name)
        assert (result == comm.size * (comm.size - 1) // 2).all()


@needs(ranks=2, seconds=True)
def check_all_send_before_they_receive(comm: Communicator) -> None:
    """In a ring, or all receive first; named and unnamed. Then the right order works."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for count, name, sends in ((3, "halo", True), (50_000, None, False)):
        what = f"'{name}'" if name else "unnamed message"
        with expect(
            ringdl.MismatchError, "wait for one another", what, "from rank 0 to rank 1", within=SOON
        ):
            comm.send(np.ones(count), right, name) if sends else comm.recv_(
                np.ones(count), left, name
            )
        work = comm.send_async(np.full(count, rank), right, name)
        assert (comm.recv_(np.ones(count, int), left, name) == left).all()
        work.wait()
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=2, seconds=True)
def check_groups_crosswise(comm: Communicator) -> None:
    """Ranks 0 and 1 each wait in a group where the other one does not arrive."""
    pair = [comm.group([0, 1]), comm.group([1, 0])]
    if comm.rank < 2:
        for name in ("crossed", None):
            mine = pair[comm.rank]
            with expect(
                ringdl.MismatchError,
                "wait for one another",
                "of the group of ranks 0 and 1",
                "rank 0 waits for",
                "which rank 1 never submitted",
                within=SOON,
            ):
                mine.allreduce(np.ones(9), name=name)
            for group in pair:
                reuse(group, name)
    elif comm.rank == 2:  # not blocked
        poll(comm, 0, "over")
    if comm.rank == 0 and comm.size > 2:
        comm.send(np.ones(1), 2, "over")
    reuse(comm)
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=3, seconds=True)
def check_groups_in_a_circle(comm: Communicator) -> None:
    """Each rank waits in its group with the next one, and nobody in the one with the one before."""
    rank, size = comm.rank, comm.size
    groups = [comm.group([r, (r + 1) % size]) for r in range(size)]
    with expect(
        ringdl.MismatchError, "wait for one another", "barrier 'go'", "rank 0 waits", within=SOON
    ):
        groups[rank].barrier("go")
    works = [group.barrier_async("go") for group in groups if group is not None]
    for work in works:
        work.wait()
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=3, seconds=True)
def check_wrong_names_in_a_group(comm: Communicator) -> None:
    """Found though the last rank never waits; its works with those that err are not hurt."""
    rank, last = comm.rank, comm.size - 1
    sick, mixed = comm.group(range(last)), comm.group([last, 0])
    for attempt in range(2):
        works = []
        if rank == 0:
            works = [mixed.allreduce_async(np.ones(n), ringdl.Sum, f"{n}") for n in (3, 50_000)]
            works.append(comm.barrier_async("of all"))
        if sick is not None:
            name = "misspelt" if rank == 0 else "spelt"
            if sick.size > 1:
                with expect(
                    ringdl.MismatchError,
                    "'spelt' of the group of rank",
                    "rank 0 waits for allreduce 'misspelt'",
                    within=SOON,
                ):
                    sick.allreduce(np.ones(5), name=name)
            reuse(sick, "spelt")
            reuse(sick, "misspelt")
        if rank == 0:
            assert not any(work.done() for work in works), "works of the late rank stay in flight"
            comm.send(np.ones(1), last, f"go on {attempt}")
        elif rank == last:
            poll(comm, 0, f"go on {attempt}")
            works = [mixed.allreduce_async(np.ones(n), ringdl.Sum, f"{n}") for n in (50_000, 3)]
        for work in works[:2]:
            assert (work.wait() == 2).all()
        (works[2] if rank == 0 else comm.barrier_async("of all")).wait()
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=4, seconds=True)
def check_another_group_goes_on(comm: Communicator) -> None:
    """Half of the ranks err, again and again; the others wait, too, but for a late one only."""
    half = comm.size // 2
    group = comm.split(int(comm.rank < half))
    if comm.rank < half:
        for _ in range(2):
            with expect(ringdl.MismatchError, "'right'", "'wrong'", within=SOON):
                group.barrier("wrong" if comm.rank == 0 else "right")
            reuse(group)
    else:
        for turn in range(3):
            if group.rank == turn % group.size:
                (busy if turn == 1 else time.sleep)(1.6)
            reuse(group, "in time")
    reuse(comm)


@needs(ranks=3, seconds=True)
def check_waiting_for_who_waits_is_not_wrong(comm: Communicator) -> None:
    """Rank 0 waits for rank 1, that for rank 2, and that sleeps, computes or polls: all is well."""
    rank = comm.rank
    first, second = comm.group([0, 1]), comm.group([1, 2])
    for delay in (time.sleep, busy):
        if rank == 2:
            delay(2.5)
        if second is not None:
            second.barrier()
        if first is not None:
            first.barrier("named")
        if rank == 0:
            comm.send(np.ones(1), 2, "after")
        elif rank == 2:  # sent once rank 0 is through
            poll(comm, 0, "after")
    comm.barrier()

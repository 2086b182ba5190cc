"""Matching by key, in any order, without negotiation; and late ranks, which are not wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator
from ringdl._work import GroupedWork, Work
from tests.ranks.support import busy, expect, needs, segments, shares_memory


def counted(comm: Communicator, calls: Callable[[], None]) -> dict[str, float]:
    """What the calls add to stats() on this rank. Barriers keep other calls' messages out."""
    comm.barrier()
    before = comm.stats()
    calls()
    after = comm.stats()
    comm.barrier()
    return {key: after[key] - before[key] for key in after}


def _in_any_order(comm: Communicator, count: int, algorithm: Any = None) -> None:
    """Twenty works, submitted in one random order, waited for in another; other ones per rank."""
    rng = np.random.default_rng([1, comm.rank])
    arrays = [np.full(count, (comm.rank + 1) * (i + 1), np.int64) for i in range(20)]
    works = {}
    for i in rng.permutation(20):
        works[i] = comm.allreduce_async_(arrays[i], ringdl.Sum, f"key {i}", algorithm=algorithm)
        if rng.random() < 0.1:
            time.sleep(0.005)
    for i in rng.permutation(20):
        total = comm.size * (comm.size + 1) // 2 * (i + 1)
        assert (works[i].wait() == total).all(), f"key {i}"


def check_small_works_need_no_negotiation(comm: Communicator) -> None:
    """Each rank sends the algorithm's messages and no other: data rides with the headers.

    Where ranks share memory they only tell one another where it is, in as few rounds.
    """
    is_shared = shares_memory(comm)
    rounds = (comm.size - 1).bit_length()
    for algorithm in ("ring", "doubling", None):
        added = counted(comm, lambda a=algorithm: _in_any_order(comm, 50, a))
        sent = added["messages_sent"]
        if algorithm == "ring":
            assert sent == 20 * 2 * (comm.size - 1), added
        elif (algorithm is None and is_shared) or comm.size in (1, 2):
            assert sent == 20 * rounds, added
        else:  # the next rank, which gets the header, may be no partner; odd ones hand in and out
            assert sent <= 20 * (rounds + 2), added
        assert added["grants_sent"] == 0, added
        assert added["works"] == 20, added


@needs(ranks=2)
def check_large_works_need_one_grant(comm: Communicator) -> None:
    count = 4096 * comm.size  # chunks of 32 KiB: eight segments
    with segments(comm, 4096):
        added = counted(comm, lambda: _in_any_order(comm, count, "ring"))
    assert added["grants_sent"] == 20, added
    assert added["data_messages_sent"] == 20 * 2 * (comm.size - 1) * 8, added
    assert added["control_messages_sent"] == 20 * 2, f"header and grant: {added}"
    assert added["data_bytes_sent"] == 20 * 2 * (comm.size - 1) * 8 * 4096, added


def check_keys_are_kept_apart(comm: Communicator) -> None:
    """The kinds count their unnamed calls apart; a name may be used again at once, many times."""
    works = []
    for i in range(5):
        works.append(comm.allreduce_async(np.array([i]), ringdl.Sum))
        assert comm.broadcast(np.array([comm.rank + i]), 0).tolist() == [i]
        assert len(comm.allgather(np.array([i]))) == comm.size
        comm.barrier()
    assert [work.wait().item() for work in works] == [i * comm.size for i in range(5)]
    works = [comm.allreduce_async(np.array([i]), ringdl.Max, "again") for i in range(50)]
    assert [work.wait().item() for work in works] == list(range(50)), "a rank may be ahead"
    long_name = "layer." * 100
    assert comm.allreduce(np.ones(1), ringdl.Sum, long_name + "a") == comm.size
    works = [comm.allreduce_async(np.array([i]), ringdl.Max, f"{long_name}{i}") for i in range(9)]
    assert [work.wait().item() for work in reversed(works)] == list(reversed(range(9)))


@needs(ranks=2)
def check_unnamed_orders_may_differ_between_kinds(comm: Communicator) -> None:
    """Rank 0 gathers before it reduces; works are matched all the same."""
    reduce = comm.allreduce_async(np.array([1]), ringdl.Sum) if comm.rank else None
    threads = [threading.Thread(target=comm.barrier, kwargs={"name": "from a thread"})]
    threads[0].start()
    if comm.rank:
        assert reduce is not None
        gathered = comm.allgather(np.array([comm.rank]))
    else:
        gathered = comm.allgather(np.array([comm.rank]))
        reduce = comm.allreduce_async(np.array([1]), ringdl.Sum)
    assert reduce.wait() == comm.size
    assert gathered.tolist() == list(range(comm.size))
    threads[0].join()


def check_threads_share_a_communicator(comm: Communicator) -> None:
    wrong: list[object] = []

    def reduce(thread: int) -> None:
        try:
            for i in range(20):
                count = 20 if i % 3 else 5000
                mine = np.full(count, comm.rank + thread)
                total = comm.size * (comm.size - 1) // 2 + thread * comm.size
                result = comm.allreduce(mine, ringdl.Sum, f"thread {thread}, {i}")
                assert (result == total).all()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=reduce, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@needs(ranks=2, seconds=True)
def check_late_is_not_wrong(comm: Communicator) -> None:
    """A rank that sleeps or computes for seconds, while all others wait, is not called wrong."""
    for delay in (time.sleep, busy):
        late = 0 if delay is busy else comm.size - 1
        if comm.rank == late:
            delay(3.0)
        assert comm.allreduce(np.ones(3), ringdl.Sum, "late").tolist() == [comm.size] * 3


@needs(ranks=2, seconds=True)
def check_crossed_waits_are_not_wrong(comm: Communicator) -> None:
    """All ranks wait, for different keys, but one of these is submitted everywhere or will be."""
    ahead = comm.rank == comm.size - 1
    if ahead:
        time.sleep(1.5)  # long enough to be told of
        first = comm.allreduce_async(np.ones(2), ringdl.Sum, "first")
        comm.barrier(name="between")
        time.sleep(1.5)
        comm.allreduce(np.ones(2), name="second")
    else:
        first = comm.allreduce_async(np.ones(2), ringdl.Sum, "first")
        comm.barrier(name="between")
        comm.allreduce(np.ones(2), name="second")
    assert first.wait().tolist() == [comm.size] * 2


@needs(ranks=2, seconds=True)
def check_stall_names_the_late_rank(comm: Communicator) -> None:
    """StallError after the timeout; the work stays in flight and ends right once the rank comes."""
    for late, count in ((0, 10), (comm.size - 1, 100_000)):
        name = f"stalled {late}"
        mine = np.full(count, comm.rank + 1.0)
        if comm.rank == late:
            time.sleep(2.0)
            work = comm.allreduce_async_(mine, ringdl.Sum, name)
        else:
            work = comm.allreduce_async_(mine, ringdl.Sum, name)
            begin = time.monotonic()
            with expect(ringdl.StallError, f"'{name}'", f"rank {late} has not arrived", "1.0 s"):
                work.wait(timeout=1)
            assert 0.9 < time.monotonic() - begin < 1.8
            assert not work.done()
        assert (work.wait() == comm.size * (comm.size + 1) / 2).all()


@needs(ranks=3)
def check_who_is_late_is_known_beside_receives_from_any_rank(comm: Communicator) -> None:
    """A rank that awaits a message of any rank answers questions later, but it does."""
    rank, late = comm.rank, comm.size - 1
    receiving = comm.recv_async_(np.empty(3), name="any") if rank == 1 else None
    begun = comm.allreduce_async(np.ones(3), name="late") if rank != late else None
    if begun is not None:
        with expect(ringdl.StallError, f"rank {late} has not arrived"):
            begun.wait(timeout=0.5)
    comm.barrier()
    if rank == late:
        comm.allreduce(np.ones(3), name="late")
    if rank == 0:
        comm.send(np.ones(3), 1, name="any")
    for work in (receiving, begun):
        assert work is None or work.wait()[0] == 1


@needs(ranks=2)
def check_stall_of_a_call_without_work(comm: Communicator) -> None:
    """What a blocking call has begun stays in flight, too, and serves the ranks that come later."""
    if comm.rank == 0:
        time.sleep(1.0)
    else:
        with expect(ringdl.StallError, "rank 0 has not arrived"):
            comm.barrier(name="given up", timeout=0.3)
        with expect(ringdl.StallError, "rank 0 has not arrived"):
            comm.broadcast(np.ones(100_000), 0, name="given up too", timeout=0.3)
    if comm.rank == 0:
        comm.barrier(name="given up")
        comm.broadcast(np.ones(100_000), 0, name="given up too")
    comm.barrier()
    assert comm.allreduce(np.ones(1), ringdl.Sum) == comm.size


def _stalled(call: Callable[[], object]) -> Work | GroupedWork | None:
    try:
        call()
    except ringdl.StallError as error:
        return error.work
    raise AssertionError("no StallError")


@needs(ranks=2)
def check_what_a_stalled_call_can_be_taken_up_by(comm: Communicator) -> None:
    """The work of all its parts; none where a call makes several collectives."""
    arrays = [np.full(count, comm.rank + 1.0) for count in (3, 5, 50_000)]
    total = comm.size * (comm.size + 1) / 2
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.recv_(np.empty(1), rank, "stalled")
        works = [comm.grouped_allreduce_async_(arrays, ringdl.Sum, "grouped")]
        comm.broadcast(np.ones(1, np.int64), 0, "object")  # the size, which comes first
    else:
        works = [
            _stalled(lambda: comm.grouped_allreduce_(arrays, ringdl.Sum, "grouped", timeout=0.3))
        ]
        assert _stalled(lambda: comm.broadcast_object("x", 0, "object", timeout=0.3)) is None
        comm.send(np.ones(1), 0, "stalled")
    result = works[0].wait()
    assert all(part is own for part, own in zip(result, arrays, strict=True))
    assert all((part == total).all() for part in arrays)
    comm.barrier()

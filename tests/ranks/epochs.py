"""What was made before shutdown() goes on after init(), with the ranks that there are then."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np

import ringdl
from ringdl.data import ShardedSampler
from tests.ranks._outside import world
from tests.ranks.support import expect, needs


def _sum(comm: ringdl.Communicator) -> int:
    """Of the ranks as the job counts them."""
    return comm.allreduce(np.array([world.rank]), ringdl.Sum).item()


def _again() -> None:
    ringdl.shutdown()
    ringdl.init()


def check_communicators_go_on() -> None:
    comm = ringdl.get_communicator()
    size, rank = ringdl.size(), ringdl.rank()
    half = comm.split(rank % 2, key=-rank)
    assert half is not None
    within = half.group([half.size - 1])
    pair = comm.group([0, size - 1]) if size > 1 else None
    also = comm.group([0, size - 1]) if size > 1 else None
    epoch = comm.epoch
    for turn in range(1, 4):
        ringdl.shutdown()
        for each in (comm, half):
            with expect(ringdl.UsageError, "call ringdl.init() first"):
                each.barrier()
        assert ringdl.init() is comm
        assert comm.epoch == half.epoch == epoch + turn
        assert (comm.rank, comm.size) == (rank, size)
        assert _sum(comm) == size * (size - 1) // 2
        assert half.allgather(np.array([rank])).tolist() == [*range(rank % 2, size, 2)][::-1]
        if within is not None:
            assert within.size == 1
            assert _sum(within) == rank == rank % 2
        made = comm.group([0, size - 1]) if size > 1 else None
        if pair is not None and also is not None and made is not None:  # three groups, not one
            works = [
                group.allreduce_async(np.array([factor]), ringdl.Sum)
                for factor, group in (
                    zip((1, 2, 3), (pair, also, made), strict=True)
                    if rank == 0
                    else zip((3, 2, 1), (made, also, pair), strict=True)
                )
            ]
            results = [work.wait().item() for work in works]
            assert results == ([2, 4, 6] if rank == 0 else [6, 4, 2])


def check_settings_and_memory_follow() -> None:
    """A group is on the hosts of today, and waits as long as it is said today."""
    comm = ringdl.get_communicator()
    group = comm.group(range(ringdl.size()))
    assert group is not None
    before = group.local_rank, group.local_size, group.host_count, group.memory_hosts()
    comm._shared.timeout = comm._timeout = group._timeout = 0.25
    _again()
    assert group._timeout == comm._timeout > 1
    after = group.local_rank, group.local_size, group.host_count, group.memory_hosts()
    assert after == before
    x = group.empty(100_000)
    x[:] = 1
    assert group.allreduce_(x, ringdl.Sum)[-1] == ringdl.size()


def check_nobody_keeps_what_nobody_holds() -> None:
    shared = weakref.ref(ringdl.get_communicator()._shared)
    ringdl.shutdown()
    gc.collect()
    assert shared() is None
    ringdl.init()


def check_buckets_are_rebound() -> None:
    buckets = ringdl.Buckets(
        [("w", (300, 7), "float32"), ("b", (5,), "bfloat16"), ("n", (0,), "float32")],
        op=ringdl.Sum,
    )
    w, b, _ = buckets.views()
    w[:], b[:] = ringdl.rank(), 2
    ringdl.shutdown()
    with expect(ringdl.UsageError, "call ringdl.init() first"):
        buckets.rebind()
    ringdl.init()
    for call in (lambda: buckets.ready(0), buckets.wait):
        with expect(ringdl.UsageError, "rebind() buckets"):
            call()
    buckets.rebind()
    assert (w == ringdl.rank()).all(), "nobody else's now, and unharmed"
    w, b, _ = buckets.views()
    assert (w == ringdl.rank()).all()
    assert (b == 2).all()
    for _ in range(3):
        w[:] = ringdl.rank()
        buckets.ready(0)
        buckets.ready(2)
        assert buckets.wait() == [True, False, True]
        assert (w == ringdl.size() * (ringdl.size() - 1) // 2).all()


@needs(ranks=2)
def check_buckets_are_rebound_to_the_same() -> None:
    """Who rebinds others hears of it, as who makes them does."""
    buckets = [ringdl.Buckets([(name, (3,), "float32")]) for name in "ab"]
    _again()
    wrong = buckets[ringdl.rank() == 0]
    with expect(ringdl.MismatchError, "name of gradient 0", '"b" on rank 0'):
        wrong.rebind()
    wrong.views()  # of before, still there
    for each in buckets:
        each.rebind()
        each.wait()


@needs(ranks=3, mpi=True)
def check_other_ranks() -> None:
    """Some of the ranks go on, in another order; one goes through other epochs; then all again."""
    from mpi4py import MPI

    comm = ringdl.get_communicator()
    size, rank = world.size, world.rank
    group = comm.group(range(1, size))
    first = comm.group(range(size - 1))
    sampler = ShardedSampler(30, shuffle=False, remainder="keep")

    def check_sampler() -> None:
        own = list(range(comm.rank, 30, comm.size))
        for each in (sampler, pickle.loads(pickle.dumps(sampler))):
            assert (list(each), len(each)) == (own, len(own))

    check_sampler()
    ringdl.shutdown()
    is_apart = rank == size - 1
    own = MPI.COMM_WORLD.Split(is_apart, key=-rank)
    assert ringdl.init(own) is comm
    check_sampler()
    if is_apart:
        assert comm.size == 1
        _lost(group, "now there are 1 ranks, and this one is rank 0: make another group")
        ringdl.shutdown()
        assert ringdl.init(own) is comm
    else:
        assert (comm.rank, comm.size) == (size - 2 - rank, size - 1)
        assert _sum(comm) == sum(range(size - 1))
        if group is not None:
            _lost(group, f"this group holds the ranks {[*range(1, size)]} of before shutdown()")
        assert first is not None
        assert first.rank == comm.rank, "as ranks are numbered now"
        assert first.allgather(np.array([rank])).tolist() == [*range(size - 1)][::-1]
    ringdl.shutdown()
    own.Free()
    assert ringdl.init() is comm
    assert (comm.rank, comm.size) == (rank, size)
    assert len(set(comm.allgather(np.array([comm.epoch])).tolist())) == 1
    for each, ranks in ((group, range(1, size)), (first, range(size - 1))):
        assert each is None or _sum(each) == sum(ranks)
    check_sampler()
    again = comm.group([0, 1])
    assert again is None or _sum(again) == 1


def _lost(group: ringdl.Communicator | None, text: str) -> None:
    assert group is not None
    for call in (group.barrier, lambda: group.local_rank, lambda: group.empty(3)):
        with expect(ringdl.UsageError, text):
            call()
    with expect(ringdl.UsageError, text):
        ringdl.Buckets([("w", (3,), "float32")], communicator=group)

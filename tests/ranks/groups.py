"""Groups of ranks: who is in them, and that each works for itself, whatever others do."""

from __future__ import annotations

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.in_flight import COLLECTIVES, EXCHANGES, ranks, run
from tests.ranks.support import assert_same_bits, expect, needs


def members_of(comm: Communicator) -> list[int]:
    """The ranks that the communicators' common origin calls its members, in their order."""
    return comm.allgather(np.array(comm._engine.rank), name="members").tolist()


def check_split(comm: Communicator) -> None:
    """One communicator per color, ordered by key; None where the color is None."""
    rank, size = comm.rank, comm.size
    by_three = comm.split(None if rank % 3 == 2 else rank % 3, key=-rank)
    assert (by_three is None) == (rank % 3 == 2)
    if by_three is not None:
        expected = list(range(rank % 3, size, 3))[::-1]
        assert members_of(by_three) == expected
        assert (by_three.rank, by_three.size) == (expected.index(rank), len(expected))
        assert f"rank {by_three.rank} of {len(expected)}" in repr(by_three)
        assert by_three.local_size == by_three.size, "all are on one host"
        assert by_three.local_rank == by_three.rank
        assert (by_three.host_rank, by_three.host_count) == (0, 1)
    assert members_of(comm.split(7)) == list(range(size)), "equal keys: in the order of the ranks"
    rotated = comm.split(-5, key=(rank + 1) % size)
    assert members_of(rotated) == [(i - 1) % size for i in range(size)]
    assert members_of(comm.split(rank)) == [rank], "alone"
    assert comm.split(None) is None


def check_group(comm: Communicator) -> None:
    """Without communication; the others get None; made twice, it is another communicator."""
    rank, size = comm.rank, comm.size
    chosen = list(range(size))[::-1][: max(1, size - 1)]
    before = comm.stats()["messages_sent"]
    first, second = comm.group(chosen), comm.group(np.array(chosen))
    assert comm.stats()["messages_sent"] == before
    assert (first is None) == (second is None) == (rank not in chosen)
    if first is None or second is None:
        return
    assert members_of(first) == chosen
    pair = [(first, 1), (second, 100)]
    works = [
        (group.allreduce_async(np.full(9, factor), ringdl.Sum, name), factor)
        for group, factor in (pair if rank % 2 else pair[::-1])
        for name in (None, "the same")
    ]
    for work, factor in works:
        assert (work.wait() == factor * len(chosen)).all(), "each is matched with its like"


def check_errors(comm: Communicator) -> None:
    """UsageErrors, on members and others alike."""
    size = comm.size
    for wrong in (-1, size):
        with expect(ringdl.UsageError, f"rank {wrong} is not a rank", f"0 to {size - 1}"):
            comm.group([0, wrong])
    with expect(ringdl.UsageError, "rank 0 occurs twice"):
        comm.group([0, 0])
    with expect(ringdl.UsageError, "at least one"):
        comm.group([])
    part = comm.split(0)
    with expect(ringdl.UsageError, "that this one was made from"):
        part.shutdown()
    with expect(ringdl.UsageError, f"root {size}", f"0 to {size - 1}"):
        part.broadcast(np.ones(2), size)
    alone = comm.group([comm.rank])
    with expect(ringdl.UsageError, "rank 1 is not a rank", "0 to 0"):
        alone.send(np.ones(1), 1)
    with expect(ringdl.UsageError, "rank 0 cannot send to itself"):
        alone.send(np.ones(1), 0)
    assert comm.allreduce(np.ones(1), ringdl.Sum) == size


def check_all_kinds_in_several_groups_at_once(comm: Communicator) -> None:
    """Under the same names, in groups that overlap, in another order on each rank."""
    size = comm.size
    rng = np.random.default_rng([3, comm.rank])
    groups = [
        comm,
        comm.split(comm.rank % 2, key=-comm.rank),
        comm.group(list(range(size))[::-1]),
        comm.group([r for r in range(size) if r != size // 2] or [0]),
        comm.group([comm.rank]),
    ]
    starts = []
    for group in groups:
        if group is None:
            continue
        for count in (3, 2000):
            for form in COLLECTIVES:
                name = f"{form.__name__} of {count}"
                starts.append(lambda g=group, f=form, n=count, name=name: f(g, n, name))
            for form in EXCHANGES:
                starts.append(lambda g=group, f=form, n=count: f(g, n, f"message of {n}"))
    run([starts[i] for i in rng.permutation(len(starts))], rng)
    comm.barrier()
    assert comm.stats()["works_in_flight"] == 0


def check_groups_of_groups(comm: Communicator) -> None:
    """Ranks and roots are those of the group that is asked."""
    backwards = comm.group(list(range(comm.size))[::-1])
    halves = backwards.split(int(backwards.rank < backwards.size // 2))
    quarters = halves.split(halves.rank % 2, key=-halves.rank)
    again = quarters.group(range(quarters.size))
    for group in (backwards, halves, quarters, again):
        members = members_of(group)
        assert members[group.rank] == comm.rank
        for root in range(group.size):
            assert group.broadcast(np.array([comm.rank]), root) == members[root]
        assert group.allreduce(np.array([comm.rank]), ringdl.Sum) == sum(members)
        assert group.allgather_object(group.rank) == list(range(group.size))
        assert_same_bits(group, group.reducescatter(np.ones((group.size, 3))))
    assert members_of(again) == members_of(quarters)


@needs(ranks=2)
def check_disjoint_groups_never_wait(comm: Communicator) -> None:
    """One half does a hundred works before the other begins, then the other way round."""
    half = comm.size // 2
    groups = [list(range(half)), list(range(half, comm.size))]
    mine = int(comm.rank >= half)
    group = comm.group(groups[mine])
    for first in (0, 1):
        if mine != first:  # begins once the others' first rank says that they have ended
            comm.recv_(np.zeros(1), groups[first][0], name=f"to rank {comm.rank}")
        for i in range(25):
            value = np.full(10 if i % 5 else 20_000, group.rank)
            assert (group.allreduce(value, ringdl.Sum) == ranks(group).sum()).all()
            assert group.allgather(np.array(i)).tolist() == [i] * group.size
            group.barrier()
            assert (group.alltoall(np.full((group.size, 3), i)) == i).all()
        if mine == first and group.rank == 0:
            for other in groups[1 - first]:
                comm.send(np.ones(1), other, name=f"to rank {other}")
        group.barrier()
    comm.barrier()


@needs(ranks=2)
def check_works_of_other_groups_go_on(comm: Communicator) -> None:
    """Who waits in one group moves its works in another: rank 1 comes when its own has ended."""
    for count in (10, 300_000):
        everybody, pair = comm.group(range(comm.size)), comm.group([0, 1])
        work = everybody.allreduce_async(np.full(count, comm.rank), ringdl.Sum, "in another group")
        expected = comm.size * (comm.size - 1) // 2
        if comm.rank == 1:
            assert (work.wait() == expected).all()
        if pair is not None:
            pair.barrier()
        if comm.rank != 1:
            assert (work.wait() == expected).all()


SPECS = [("w", (300, 7), "float32"), ("b", (7,), "float32"), ("h", (90,), "float16")]


def check_buckets_in_groups(comm: Communicator) -> None:
    """In two overlapping groups and in all ranks at once, round after round."""
    size = comm.size
    rng = np.random.default_rng([6, comm.rank])
    chosen = [list(range(size)), list(range(size - size // 3))[::-1], list(range(size // 3, size))]
    groups = {i: group for i, r in enumerate(chosen) if (group := comm.group(r)) is not None}
    buckets = {
        i: ringdl.Buckets(
            SPECS, bucket_bytes=4000, first_bucket_bytes=900, op=ringdl.Sum, communicator=group
        )
        for i, group in groups.items()
    }
    views = {i: group_buckets.views() for i, group_buckets in buckets.items()}
    for turn in range(4):
        calls = [(i, gradient) for i in buckets for gradient in range(len(SPECS))]
        for call in rng.permutation(len(calls)):
            i, gradient = calls[call]
            if turn == 3 and gradient == 1 and groups[i].rank == 0:
                continue  # missing there
            views[i][gradient][...] = comm.rank + 10 * i + turn
            buckets[i].ready(gradient)
        # A bucket with a gap is only launched by wait(): then all ranks wait in one order.
        for i in rng.permutation(list(buckets)) if turn < 3 else buckets:
            produced = buckets[i].wait()
            total = sum(chosen[i]) + (10 * i + turn) * len(chosen[i])
            assert produced == [True, turn < 3 or groups[i].size > 1, True], (turn, produced)
            for gradient, view in enumerate(views[i]):
                absent = chosen[i][0] + 10 * i + turn if turn == 3 and gradient == 1 else 0
                assert (view == total - absent).all(), (turn, i, gradient)
    del buckets, views
    comm.barrier()


def check_colors(comm: Communicator) -> None:
    """Integers of any type; nothing else."""
    colors = (0, np.int64(0), False, np.uint8(0))
    whole = comm.split(colors[comm.rank % 4], np.int32(comm.rank))
    assert whole.size == comm.size
    assert whole.allreduce(np.ones(1), ringdl.Sum) == comm.size
    for call in (lambda: comm.split(0.5), lambda: comm.split(0, "1"), lambda: comm.group([0.0])):
        try:
            call()
        except TypeError:
            continue
        raise AssertionError("it was accepted")
    comm.barrier()

"""Ranks that disagree: MismatchError on every rank, soon, saying what and who; then all goes on."""

from __future__ import annotations

import time

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.support import expect, expect_no_growth, needs, until

SOON = 5.0


def reuse(comm: Communicator, name: str) -> None:
    """The key works again at once, small and large."""
    for count in (3, 50_000):
        result = comm.allreduce(np.full(count, comm.rank), ringdl.Sum, name)
        assert (result == comm.size * (comm.size - 1) // 2).all()


@needs(ranks=2)
def check_one_rank_differs(comm: Communicator) -> None:
    """In shape, dtype or reduction; each rank in turn; small and large."""
    for count in (4, 50_000):
        for wrong in range(comm.size):
            here = comm.rank == wrong
            differences = {
                "shape": (np.ones(count + 1 if here else count), ringdl.Sum),
                "shape (": (np.ones((2, count // 2) if here else count), ringdl.Sum),
                "dtype": (np.ones(count, np.int64 if here else np.float64), ringdl.Sum),
                "reduction": (np.ones(count), ringdl.Max if here else ringdl.Average),
            }
            for field, (x, op) in differences.items():
                with expect(
                    ringdl.MismatchError, field, f"rank {wrong}", "allreduce 'x'", within=SOON
                ):
                    comm.allreduce(x, op, "x")
                reuse(comm, "x")
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=2)
def check_one_rank_differs_unnamed(comm: Communicator) -> None:
    for wrong in range(comm.size):
        x = np.ones(5 if comm.rank == wrong else 4, np.float32)
        with expect(ringdl.MismatchError, "shape", f"rank {wrong}", "unnamed", within=SOON):
            comm.allreduce(x)
        with expect(ringdl.MismatchError, "dtype", f"rank {wrong}", within=SOON):
            comm.broadcast(np.ones(4, np.int8 if comm.rank == wrong else np.bool_))
        with expect(ringdl.MismatchError, "shape", f"rank {wrong}", within=SOON):
            comm.allgather(np.ones((2, 5 if comm.rank == wrong else 4)))
        assert comm.allreduce(np.ones(1), ringdl.Sum) == comm.size
        assert comm.broadcast(np.array([comm.rank])).tolist() == [0]
        assert len(comm.allgather(np.ones((2, 3)))) == 2 * comm.size


@needs(ranks=2)
def check_roots_differ(comm: Communicator) -> None:
    for count in (4, 50_000):
        for wrong in range(comm.size):
            root = 1 if comm.rank == wrong else 0
            with expect(ringdl.MismatchError, "root", f"rank {wrong}", within=SOON):
                comm.broadcast(np.ones(count), root, name="weights")
            assert (comm.broadcast(np.full(count, comm.rank), 1, name="weights") == 1).all()


@needs(ranks=2)
def check_groups_differ(comm: Communicator) -> None:
    """In shapes, or in their order, though there are as many elements."""
    for name in (None, "g"):
        for mine, others in (((3, 5), (4, 4)), ((2, 6), (6, 2)), (((2, 3), 4), ((3, 2), 4))):
            group = [np.ones(shape) for shape in (mine if comm.rank == 0 else others)]
            with expect(ringdl.MismatchError, "shapes of the arrays that are", within=SOON):
                comm.grouped_allreduce(group, ringdl.Sum, name)
        for each in comm.grouped_allreduce([np.ones(3), np.ones((2, 2))], ringdl.Sum, name):
            assert (each == comm.size).all()
        with expect(ringdl.MismatchError, "(8,) on rank", "(7,) on rank 0"):
            comm.grouped_allreduce([np.ones(4), np.ones(4 if comm.rank else 3)], name=name)


@needs(ranks=2)
def check_kinds_differ(comm: Communicator) -> None:
    for wrong in range(comm.size):
        with expect(
            ringdl.MismatchError, "kind", "allreduce", "broadcast", f"rank {wrong}", within=SOON
        ):
            if comm.rank == wrong:
                comm.broadcast(np.ones(3), 0, "x")
            else:
                comm.allreduce(np.ones(3), name="x")
        reuse(comm, "x")
        with expect(ringdl.MismatchError, "kind", "barrier", within=SOON):
            comm.barrier("x") if comm.rank == wrong else comm.allgather(np.ones(9999), "x")
        reuse(comm, "x")


@needs(ranks=2)
def check_late_rank_hears_of_it(comm: Communicator) -> None:
    """The error may be known before a rank has called; it fails there, too, and only once."""
    wrong = comm.size - 1
    if comm.rank == wrong // 2:
        time.sleep(0.3)
    for _ in range(2):
        work = comm.allreduce_async(np.ones(3 if comm.rank == wrong else 2), name="x")
        with expect(ringdl.MismatchError, "shape", f"rank {wrong}"):
            work.wait()
        assert work.done()
        with expect(ringdl.MismatchError, "shape", f"rank {wrong}"):
            work.wait()
    reuse(comm, "x")


@needs(ranks=2, seconds=True)
def check_wrong_names(comm: Communicator) -> None:
    """Every rank waits, for keys that some rank never submits: called wrong, and all goes on."""
    for wrong in {0, comm.size - 1}:
        name = "misspelt" if comm.rank == wrong else "spelt"
        with expect(ringdl.MismatchError, "'spelt'", "'misspelt'", f"rank {wrong}", within=SOON):
            comm.allreduce(np.ones(3), name=name)
        for name in ("spelt", "misspelt"):
            reuse(comm, name)
    with expect(ringdl.MismatchError, "'rank 0'", "'rank 1'", within=SOON):
        comm.allreduce(np.ones(50_000), name=f"rank {comm.rank}")
    for rank in range(comm.size):
        reuse(comm, f"rank {rank}")
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=2, seconds=True)
def check_one_call_too_many(comm: Communicator) -> None:
    """Unnamed calls go on in step after one rank has made one more than the others."""
    for extra in {0, comm.size - 1}:
        with expect(ringdl.MismatchError, "unnamed allreduce", "unnamed barrier", within=SOON):
            if comm.rank == extra:
                comm.allreduce(np.ones(3))
            else:
                comm.barrier()
        assert comm.allreduce(np.ones(1), ringdl.Sum) == comm.size
        comm.barrier()
        assert comm.allreduce(np.ones(50_000), ringdl.Sum)[-1] == comm.size


@needs(ranks=2)
def check_hundreds_beside_healthy_works(comm: Communicator) -> None:
    """Mismatches leave other works alone and nothing behind."""
    last = comm.size - 1
    healthy = [np.full(200_000, comm.rank, np.float32) for _ in range(3)]
    works = [
        comm.allreduce_async_(x, ringdl.Sum, f"healthy {i}")
        for i, x in enumerate(healthy)
        if comm.rank != last or i == 0  # the other two stay in flight all the while
    ]
    for i in range(150):
        count = (6, 20_000)[i % 2]
        wrong = i % comm.size
        x = np.ones(count + (comm.rank == wrong))
        with expect(ringdl.MismatchError, "shape", f"rank {wrong}"):
            comm.allreduce_(x, name="sick" if i % 3 else f"sick {i}")
    if comm.rank == last:
        works += [comm.allreduce_async_(healthy[i], ringdl.Sum, f"healthy {i}") for i in (1, 2)]
    for work, x in zip(works, healthy, strict=True):
        assert work.wait() is x
        assert (x == comm.size * last / 2).all()
    reuse(comm, "sick")
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0
    assert until(lambda: comm.stats()["works_in_flight"] == 0)


@needs(ranks=2, processes=True)
def check_mismatches_cost_no_memory(comm: Communicator) -> None:
    def mismatches(count: int) -> None:
        for i in range(count):
            x = np.ones(30_000 + (comm.rank == i % comm.size))
            with expect(ringdl.MismatchError, "shape"):
                comm.allreduce_(x, name="sick")

    # Each leaves 240 KB if its buffer is not let go.
    expect_no_growth(comm, mismatches, 100, 300, 8 << 20)
    many = [comm.allreduce_async_(np.ones(5000), ringdl.Sum, f"tag {i}") for i in range(300)]
    assert all((work.wait() == comm.size).all() for work in many), "tags are free again"

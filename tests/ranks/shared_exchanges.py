"""Broadcast, allgather, alltoall and reducescatter in memory that the ranks of a host share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator, Work
from tests.ranks.reference import REDUCTIONS, Array, dtypes_and_reductions, random_array, reduced
from tests.ranks.support import (
    LARGE,
    assert_same_bits,
    bits,
    expect,
    expect_no_growth,
    needs,
    shares_memory,
)


def placed(comm: Communicator, values: Array, ordinary: set[int]) -> Array:
    """The values in an array of the communicator, or in an ordinary one on some ranks."""
    array: Array = (
        np.empty(values.shape, values.dtype)
        if comm.rank in ordinary
        else comm.empty(values.shape, values.dtype)
    )
    array[...] = values
    return array


def places(comm: Communicator) -> Iterator[set[int]]:
    """Who has an ordinary array: nobody, all, the first, the last."""
    yield from (set(), set(range(comm.size)), {0}, {comm.size - 1})


def dealt(rows: int, size: int, rank: int) -> slice:
    begin = rows // size * rank + min(rank, rows % size)
    return slice(begin, begin + rows // size + (rank < rows % size))


@needs(ranks=2)
def check_every_kind(comm: Communicator) -> None:
    """Several blocks of each rank, wherever the arrays are; no message but those of places."""
    rank, size = comm.rank, comm.size
    is_shared = shares_memory(comm)
    for ordinary in places(comm):
        for rows in (1, 3000, 300_001):
            before = comm.stats()["data_bytes_sent"]
            block = [np.arange(rows + 5 * r, dtype=np.float32) + r for r in range(size)]
            mine = placed(comm, block[rank], ordinary)
            assert np.array_equal(comm.allgather(mine), np.concatenate(block))
            for root in (0, size - 1):
                x = placed(comm, block[rank][:rows], ordinary)
                assert comm.broadcast_(x, root) is x
                assert np.array_equal(x, block[root][:rows])
            splits = [
                [(rows + r * 7 + to) // size * (to != 1) for to in range(size)] for r in range(size)
            ]
            parts = [np.arange(sum(splits[r]), dtype=np.int16) + r for r in range(size)]
            begins = [sum(splits[r][:rank]) for r in range(size)]
            result, counts = comm.alltoall(placed(comm, parts[rank], ordinary), splits[rank])
            assert counts == [splits[r][rank] for r in range(size)]
            expected = [parts[r][begins[r] :][: splits[r][rank]] for r in range(size)]
            assert np.array_equal(result, np.concatenate(expected))
            x = placed(comm, np.arange(rows * 2.0).reshape(-1, 2) + rank, ordinary)
            total = np.arange(rows * 2.0).reshape(-1, 2) * size + size * (size - 1) // 2
            scattered = comm.reducescatter(x, ringdl.Sum)
            assert np.array_equal(scattered, total[dealt(rows, size, rank)])
            assert np.array_equal(mine, block[rank]), "the argument was changed"
            assert comm.stats()["data_bytes_sent"] == before or not is_shared


@needs(ranks=2)
def check_every_dtype_and_reduction(comm: Communicator) -> None:
    """The same bits wherever the arrays are, and in a second run."""
    for count, dtype, op in dtypes_and_reductions(8193, 70_001):
        arrays = [random_array(r, count, dtype, op, 3) for r in range(comm.size)]
        part = dealt(count, comm.size, comm.rank)
        results = [
            comm.reducescatter(placed(comm, arrays[comm.rank], ordinary), op)
            for ordinary in places(comm)
        ]
        reduced([a[part] for a in arrays], op).check(results[0], f"{op.name} of {dtype}")
        assert len({bits(result) for result in results}) == 1, f"{op.name} of {dtype}"


@needs(ranks=2)
def check_parts_of_arrays(comm: Communicator) -> None:
    """Views that begin anywhere; what is beside them stays."""
    base = comm.empty(200_001, np.float64)
    for begin, end in ((0, 40_000), (1, 150_000), (3, 200_000)):
        base[...] = comm.rank
        comm.broadcast_(base[begin:end], comm.size - 1)
        assert (base[begin:end] == comm.size - 1).all()
        assert (base[:begin] == comm.rank).all()
        assert (base[end:] == comm.rank).all()
    rows = comm.empty((300, 400))
    rows[...] = comm.rank
    comm.broadcast_(rows[::2, ::3], 0)  # copied, and written back
    assert (rows[::2, ::3] == 0).all()
    assert (rows[1::2] == comm.rank).all()
    scalar = comm.empty((), np.int64)
    scalar[...] = comm.rank
    assert comm.allgather(scalar).tolist() == list(range(comm.size))
    assert comm.allgather(comm.empty((0, 5))).shape == (0, 5)
    assert comm.alltoall(comm.empty((0, 5))).shape == (0, 5)
    assert comm.reducescatter(comm.empty((0, 5))).shape == (0, 5)


@needs(ranks=2)
def check_many_in_any_order(comm: Communicator) -> None:
    rng = np.random.default_rng([2, comm.rank])
    rank, size = comm.rank, comm.size
    total = size * (size - 1) // 2
    starts: list[Callable[[Array, str], Work[Any]]] = [
        lambda x, name: comm.broadcast_async_(x, 1, name),
        comm.allgather_async,
        lambda x, name: comm.alltoall_async(x, name=name),
        lambda x, name: comm.reducescatter_async(x, ringdl.Sum, name),
    ]
    for _ in range(3):
        counts = [size * (2000 + 3000 * i) for i in range(20)]
        arrays = [
            placed(comm, np.full(counts[i], rank, np.float32), {i % (size + 1)}) for i in range(20)
        ]
        works = {}
        for i in rng.permutation(20):
            works[i] = starts[i % 4](arrays[i], f"exchange {i}")
        for i in rng.permutation(20):
            result, count = works[i].wait(), counts[i]
            if i % 4 == 0:
                assert (result == 1).all()
            elif i % 4 == 3:
                assert (result == total).all()
            else:
                each = count if i % 4 == 1 else count // size
                assert np.array_equal(result, np.repeat(np.arange(size, dtype=np.float32), each))


@needs(ranks=2)
def check_groups(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2)
    reverse = comm.group(list(reversed(range(comm.size))))
    by_turns = comm.group(sorted(range(comm.size), key=lambda rank: (rank % 2, rank)))
    assert half is not None
    for group in (half, reverse, by_turns):
        for root in range(group.size):
            x = placed(group, np.full(LARGE, group.rank, np.float32), set())
            expected = np.repeat(np.arange(group.size), LARGE)
            assert np.array_equal(group.allgather(x), expected)
            assert np.array_equal(group.alltoall(expected), np.repeat(group.rank, len(expected)))
            part = dealt(LARGE, group.size, group.rank)
            steps = np.arange(LARGE, dtype=np.float32)
            total = group.size * (group.size - 1) // 2 + group.size * steps
            assert np.array_equal(group.reducescatter(x + steps, ringdl.Sum), total[part])
            assert (group.broadcast_(x, root) == root).all()


@needs(ranks=2)
def check_messages(comm: Communicator) -> None:
    """A message is a broadcast between two ranks."""
    x = placed(comm, np.full(500_000, comm.rank, np.float32), {0})
    for other in range(1, comm.size):
        if comm.rank == 0:
            comm.send(x, other)
        elif comm.rank == other:
            assert (comm.recv_(x, 0) == 0).all()


@needs(ranks=2)
def check_disagreements(comm: Communicator) -> None:
    """On every rank; nothing is written, and the next call with that name is right."""
    is_shared = shares_memory(comm)
    for wrong in range(comm.size):
        disagree(comm, wrong, is_shared=is_shared)


def disagree(comm: Communicator, wrong: int, *, is_shared: bool) -> None:
    rank, rows = comm.rank, comm.size * LARGE
    is_wrong = rank == wrong
    x = placed(comm, np.full((rows, 2), rank, np.float32), {wrong})
    y = placed(comm, np.full((rows, 3 if is_wrong else 2), rank, np.float32), set())
    z = placed(comm, np.full((rows, 2), rank, np.int32 if is_wrong else np.float32), set())
    few = x[:1] if is_wrong else x
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("root", lambda: comm.broadcast_(x, int(is_wrong), "call")),
        ("shape", lambda: comm.broadcast_(y, 0, "call")),
        ("shape", lambda: comm.broadcast_(few, 0, "call")),
        ("shape", lambda: comm.allgather(y, "call")),
        ("dtype", lambda: comm.alltoall(z, name="call")),
        ("shape", lambda: comm.reducescatter(few, ringdl.Sum, "call")),
        ("reduction", lambda: comm.reducescatter(x, REDUCTIONS[int(is_wrong)], "call")),
        ("dtype", lambda: comm.reducescatter(z, ringdl.Sum, "call")),
    ]
    for what, call in calls:
        with expect(ringdl.MismatchError, what, f"rank {wrong}", within=5):
            call()
    if is_shared:
        assert all((array == rank).all() for array in (x, y, z)), "a failed work has written"
    assert (comm.broadcast_(x, wrong, "call") == wrong).all()


@needs(ranks=2, seconds=True)
def check_a_late_rank(comm: Communicator) -> None:
    """A work that timed out has read and written nothing; it ends right once the rank comes."""
    late, is_shared = comm.size - 1, shares_memory(comm)
    rank, size = comm.rank, comm.size
    x = placed(comm, np.full(300_000 * size, rank, np.float32), {0})
    starts: dict[str, Callable[[], Work[Any]]] = {
        "broadcast": lambda: comm.broadcast_async_(x, 0, "late"),
        "allgather": lambda: comm.allgather_async(x, "late"),
        "alltoall": lambda: comm.alltoall_async(x, name="late"),
        "reducescatter": lambda: comm.reducescatter_async(x, ringdl.Sum, "late"),
    }
    for kind, start in starts.items():
        x[...] = rank
        if rank != late:
            work = start()
            with expect(ringdl.StallError, f"{kind} 'late'", f"rank {late} has not arrived"):
                work.wait(timeout=1.0)
            assert (x == rank).all() or not is_shared, "written before all have arrived"
        comm.allreduce(np.zeros(1), name="now come")
        if rank == late:
            work = start()
        result = work.wait()
        if kind == "broadcast":
            assert (result == 0).all()
        elif kind == "reducescatter":
            assert (result == size * (size - 1) // 2).all()
        else:
            each = len(x) if kind == "allgather" else len(x) // size
            assert np.array_equal(result, np.repeat(np.arange(size), each))
        comm.barrier()


@needs(ranks=2)
def check_arrays_dropped_in_flight(comm: Communicator) -> None:
    """The works keep them; memory that is given out meanwhile is other memory."""
    for i in range(10):
        values = np.full(50_000, comm.rank, np.float32)
        work = comm.allgather_async(placed(comm, values, set()), f"dropped {i}")
        other = placed(comm, np.full(50_000, -1, np.float32), set())
        if i % 2:
            gc.collect()
        result = work.wait()
        assert_same_bits(comm, result)
        assert np.array_equal(result, np.repeat(np.arange(comm.size), 50_000))
        assert (other == -1).all()


@needs(ranks=2, processes=True)
def check_memory_is_given_back(comm: Communicator) -> None:
    """Results and stages go back to the system. Between hosts MPI keeps buffers of its own."""
    if not shares_memory(comm):
        return

    def use(count: int) -> None:
        for _ in range(count):
            for ordinary in (set(), {0}):
                x = placed(comm, np.full(comm.size << 18, comm.rank, np.float32), ordinary)
                comm.allgather(x)
                comm.alltoall(x)
                comm.broadcast_(x)
                comm.reducescatter(x)

    expect_no_growth(comm, use, 3, 6, 8 << 20)

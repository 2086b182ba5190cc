"""Alltoall, gather, scatter, messages and gathered objects: what goes in comes out elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import DTYPES, Array, random_array
from tests.ranks.support import bits, expect, needs, segments

# Bytes of a segment, and elements of a row: many segments, some of them inline; one; no bytes.
SHAPES = ((64, (3,)), (4096, (2, 5)), (256 << 10, ()), (64, (2, 0)))

# Rows from one rank for another.
Split = Callable[[int, int], int]


def splits_of(size: int) -> dict[str, Split]:
    return {
        "none": lambda r, to: 0,
        "one": lambda r, to: int((r, to) == (size - 1, 0)),
        "uneven": lambda r, to: (3 * r + 5 * to) % 7,
        "to the next": lambda r, to: 900 * (to == (r + 1) % size),
        "to the last": lambda r, to: 300 * (to == size - 1),
    }


def block(rank: int, rows: int, row: tuple[int, ...], dtype: np.dtype, seed: int = 4) -> Array:
    """Some rows of one rank; every rank can make them."""
    flat = random_array(rank, rows * int(np.prod(row)), dtype, ringdl.Sum, seed)
    return flat.reshape(rows, *row)


def check_alltoall(comm: Communicator) -> None:
    """Every dtype; splits of all kinds; what came is what was sent, in rank order."""
    rank, ranks = comm.rank, range(comm.size)
    for segment_bytes, row in SHAPES:
        with segments(comm, segment_bytes):
            for number, dtype in enumerate(DTYPES):
                kinds = list(splits_of(comm.size).items())
                for what, split in kinds if row == (3,) else kinds[number % 2 :: 2]:
                    sent = [block(r, sum(split(r, to) for to in ranks), row, dtype) for r in ranks]
                    begin = [sum(split(r, to) for to in range(rank)) for r in ranks]
                    came = [split(r, rank) for r in ranks]
                    parts = [sent[r][begin[r] : begin[r] + came[r]] for r in ranks]
                    before = bits(sent[rank])
                    result, counts = comm.alltoall(sent[rank], [split(rank, to) for to in ranks])
                    assert counts == came, (what, dtype, row)
                    assert result.shape == (sum(came), *row)
                    assert result.dtype == dtype
                    assert bits(result) == bits(np.concatenate(parts)), (what, dtype, row)
                    assert bits(sent[rank]) == before, "the argument was changed"
                    result[...] = 0  # it belongs to the caller


def check_alltoall_without_splits(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for rows in (0, 1, 700):
        mine = np.arange(rows * size * 2).reshape(-1, 2) + 10_000 * rank
        result = comm.alltoall(mine)
        expected = [
            np.arange(rows * size * 2).reshape(-1, 2)[rank * rows :][:rows] + 10_000 * r
            for r in range(size)
        ]
        assert np.array_equal(result, np.concatenate(expected))
        assert np.array_equal(comm.alltoall(result), mine), "twice is back"
    assert np.array_equal(comm.alltoall(np.asfortranarray(mine), name="other order"), result)
    assert np.array_equal(
        comm.alltoall(np.repeat(mine, 2, axis=1)[:, ::2], [rows] * size)[0], result
    )


def check_gather(comm: Communicator) -> None:
    """To every root, every dtype, uneven; the others get None."""
    for segment_bytes, row in SHAPES:
        with segments(comm, segment_bytes):
            for root in range(comm.size):
                for number, dtype in enumerate(DTYPES):
                    rows = (lambda r: r, lambda r: 500 * (r == 1), lambda r: 90 - r)[
                        (number + root) % 3
                    ]
                    blocks = [block(r, rows(r), row, dtype) for r in range(comm.size)]
                    before = bits(blocks[comm.rank])
                    result = comm.gather(blocks[comm.rank], root)
                    assert bits(blocks[comm.rank]) == before, "the argument was changed"
                    if comm.rank != root:
                        assert result is None
                        continue
                    assert result.dtype == dtype
                    assert result.shape == (sum(map(len, blocks)), *row)
                    assert bits(result) == bits(np.concatenate(blocks)), (root, dtype, row)
                    result[...] = 0


def check_scatter(comm: Communicator) -> None:
    """From every root, every dtype; as evenly as can be, or by splits."""
    rank, size = comm.rank, comm.size
    for segment_bytes, row in SHAPES:
        with segments(comm, segment_bytes):
            for root in range(size):
                for number, dtype in enumerate(DTYPES):
                    rows = (0, 1, size - 1, 3 * size + 1, 611)[(number + root) % 5]
                    even = [rows // size + (r < rows % size) for r in range(size)]
                    uneven = [0] * size
                    uneven[(root + number) % size], uneven[-1] = rows - rows // 3, 0
                    uneven[-1] += rows - sum(uneven)
                    whole = block(root, rows, row, dtype)
                    before = bits(whole)
                    mine = whole if rank == root else np.ones((rank, *row), dtype)
                    for splits, counts in ((None, even), (uneven, uneven)):
                        result = comm.scatter(mine, root, splits if rank == root else None)
                        begin = sum(counts[:rank])
                        expected = whole[begin : begin + counts[rank]]
                        assert result.dtype == dtype
                        assert result.shape == expected.shape
                        assert bits(result) == bits(expected), (root, dtype, counts)
                        result[...] = 0
                        assert bits(whole) == before, "the argument was changed"


def check_without_axes(comm: Communicator) -> None:
    """One row where rows are collected; refused where they are dealt."""
    rank, size = comm.rank, comm.size
    gathered = comm.gather(np.array(rank), size - 1)
    assert rank != size - 1 or gathered.tolist() == list(range(size))
    for call in (comm.alltoall, comm.alltoall_async, comm.scatter, comm.reducescatter):
        with expect(ringdl.UsageError, "without axes has none"):
            call(np.array(1.0))
    if size > 1 and rank < 2:
        x = np.array(rank + 1.5)
        if rank == 0:
            assert comm.send(x, 1) is None
        else:
            assert comm.recv_(x, 0) is x
        assert x.shape == ()
        assert x == 1.5
    comm.barrier()


@needs(ranks=2)
def check_messages(comm: Communicator) -> None:
    """Every dtype, from each rank to the next and the one before, as in a halo exchange."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for segment_bytes, row in SHAPES:
        with segments(comm, segment_bytes):
            for dtype in DTYPES:
                for rows in (0, 1, 803):
                    mine = block(rank, rows, row, dtype)
                    before = bits(mine)
                    from_left, from_right = np.ones_like(mine), np.ones_like(mine)
                    works = [
                        comm.send_async(mine, right, "to the right"),
                        comm.send_async(mine, left, "to the left"),
                        comm.recv_async_(from_left, left, "to the right"),
                        comm.recv_async_(from_right, right, "to the left"),
                    ]
                    results = [work.wait() for work in works]
                    assert results[:2] == [None, None]
                    assert results[2] is from_left
                    assert results[3] is from_right
                    assert bits(from_left) == bits(block(left, rows, row, dtype)), (dtype, rows)
                    assert bits(from_right) == bits(block(right, rows, row, dtype)), (dtype, rows)
                    assert bits(mine) == before, "the argument was changed"


@needs(ranks=2)
def check_messages_keep_their_order(comm: Communicator) -> None:
    """Unnamed ones are matched by their number between two ranks, whatever other ranks do."""
    rank, size = comm.rank, comm.size
    for r in range(1, size):
        for count in (1, 5000):
            if rank == 0:
                sent = [comm.send_async(np.full(count, 10 * r + i), r) for i in range(5)]
                back = np.zeros(count, int)
                assert (comm.recv_(back, r) == -r).all()
                for work in sent:
                    work.wait()
            elif rank == r:
                got = [comm.recv_async_(np.zeros(count, int), 0) for _ in range(5)]
                comm.send(np.full(count, -r), 0)
                for i, work in reversed(list(enumerate(got))):
                    assert (work.wait() == 10 * r + i).all()
    strided = np.zeros((6, 8))
    if rank == 0:
        comm.send(np.arange(12.0).reshape(3, 4).T, size - 1, "a view")
    if rank == size - 1:
        view = strided[:4, ::3]
        assert comm.recv_(view, 0, "a view") is view
        assert np.array_equal(view, np.arange(12.0).reshape(3, 4).T)
        assert strided[:, 1::3].sum() == 0, "wrote beside the view"


@needs(ranks=2)
def check_messages_from_any_rank(comm: Communicator) -> None:
    """Each once, in its sender's order; also in a group, whose ranks count otherwise."""
    for group in (comm, comm.group([*range(comm.size)][::-1])):
        rank, others = group.rank, [*range(1, group.size)]
        for name in (None, "x"):
            if rank > 0:
                for number in range(3):
                    group.send(np.array([rank, number]), 0, name)
                continue
            arrays = [np.empty(2, int) for _ in range(3 * len(others))]
            works = [group.recv_async_(array, name=name) for array in arrays]
            assert [work.wait() is array for work, array in zip(works, arrays, strict=True)]
            assert [work.source for work in works] == [array[0] for array in arrays]
            for other in others:
                assert [array[1] for array in arrays if array[0] == other] == [0, 1, 2]
        group.barrier()
    if comm.rank == 0:
        assert comm.recv_(np.empty(1)) == comm.size - 1
        comm.barrier()
        work = comm.recv_async_(np.empty(1), 1)
        assert work.source == 1
        work.wait()
    else:
        if comm.rank == comm.size - 1:
            comm.send(np.array([comm.size - 1.0]), 0)
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.ones(1), 0)


def check_objects(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for i, make in enumerate((lambda r: None, lambda r: {"r": [r, "x" * 100 * r]}, lambda r: b"")):
        mine = make(rank)
        result = comm.allgather_object(mine, name=f"object {i}" if i else None)
        assert result == [make(r) for r in range(size)]
    large = comm.allgather_object(np.full(100_000 * (rank == size - 1) + 1, rank))
    assert [len(x) for x in large] == [1] * (size - 1) + [100_001]
    mine = [rank]
    assert comm.allgather_object(mine)[rank] is not mine, "a copy too"


def check_refused(comm: Communicator) -> None:
    """UsageErrors before anything is submitted: the ranks stay in step."""
    size, x = comm.size, np.zeros((2 * comm.size, 3))
    with expect(ringdl.UsageError, "not divisible" if size > 1 else "adds up"):
        comm.alltoall(x[:-1]) if size > 1 else comm.alltoall(x, [1])
    for call, kind in (
        (lambda s: comm.alltoall(x, s), "alltoall"),
        (lambda s: comm.scatter(x, comm.rank, s), "scatter"),
    ):
        with expect(ringdl.UsageError, kind, f"names {size + 1} ranks", f"there are {size}"):
            call([0] * (size + 1))
        with expect(ringdl.UsageError, kind, "adds up to 1 rows", f"has {2 * size}"):
            call([1] + [0] * (size - 1))
        with expect(ringdl.UsageError, kind, "negative -1"):
            call([-1] + [0] * (size - 1))
    for root in (-1, size):
        for call in (comm.gather, comm.scatter):
            with expect(ringdl.UsageError, f"root {root} is not a rank"):
                call(x, root)
        for call in (comm.send, comm.recv_, comm.send_async, comm.recv_async_):
            with expect(ringdl.UsageError, f"rank {root} is not a rank"):
                call(x, root)
    for call in (comm.send, comm.recv_):
        with expect(ringdl.UsageError, f"rank {comm.rank} cannot send to itself"):
            call(x, comm.rank)
    if size == 1:
        with expect(ringdl.UsageError, "no other rank to receive from"):
            comm.recv_(x)
    read_only = x.copy()
    read_only.flags.writeable = False
    if size > 1:
        with expect(ringdl.UsageError, "read-only"):  # named: its sender will not hear of it
            comm.recv_(read_only, (comm.rank + 1) % size, "wrong")
    assert len(comm.alltoall(read_only)) == 2 * size, "reading is enough"
    calls = (comm.alltoall, comm.gather, comm.scatter, comm.reducescatter, comm.gather_async)
    for text, wrong in {"complex64": x.astype(np.complex64), "list": [1.0]}.items():
        for call in calls:
            with expect(ringdl.UsageError, text):
                call(wrong)
        if size > 1:
            with expect(ringdl.UsageError, text):
                comm.send(wrong, (comm.rank + 1) % size, f"wrong {text}")
    assert comm.stats()["works_in_flight"] == 0

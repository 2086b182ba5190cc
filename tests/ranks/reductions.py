"""Other forms of reducing: reducescatter, several arrays as one, named algorithms, MPI's own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import (
    DTYPES,
    REDUCTIONS,
    Array,
    Expected,
    random_array,
    reduced,
    reductions_of,
)
from tests.ranks.support import assert_same_bits, bits, expect, needs, segments, shares_memory

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rows_of(rank: int, size: int, rows: int) -> slice:
    """Where a rank's rows are: as evenly as can be, earlier ranks take the remainder."""
    begin = rank * (rows // size) + min(rank, rows % size)
    return slice(begin, begin + rows // size + (rank < rows % size))


def part_of(whole: Expected, shape: tuple[int, ...], rows: slice) -> Expected:
    def cut(x: Any) -> Array:
        return np.broadcast_to(x, whole.value.shape).reshape(shape)[rows]

    return Expected(cut(whole.value), cut(whole.bound))


def check_reducescatter(comm: Communicator) -> None:
    """Every dtype and reduction; rows that are none, few, uneven, many, and of no bytes."""
    rank, size = comm.rank, comm.size
    for shape, segment_bytes in (
        ((0, 3), 64),
        ((1,), 64),
        ((size - 1, 2), 64),
        ((3 * size + 1, 1, 5), 64),
        ((size + 1, 0), 64),
        ((2003,), 256),
        ((501, 40), 4096),
    ):
        with segments(comm, segment_bytes):
            for i, dtype in enumerate(DTYPES):
                few = (REDUCTIONS[i % 5], REDUCTIONS[(i + 1) % 5])
                for op in reductions_of(dtype) if shape[0] < 500 else few:
                    count = int(np.prod(shape))
                    arrays = [random_array(r, count, dtype, op, 8) for r in range(size)]
                    mine = arrays[rank].reshape(shape)
                    before = bits(mine)
                    result = comm.reducescatter(mine, op)
                    what = f"{op.name} of {shape} {dtype} in segments of {segment_bytes}"
                    assert bits(mine) == before, f"{what}: the argument was changed"
                    assert result.dtype == dtype
                    part_of(reduced(arrays, op), shape, rows_of(rank, size, shape[0])).check(
                        result, what
                    )
                    first = bits(result)
                    result[...] = 0  # it belongs to the caller
                    assert bits(comm.reducescatter(mine, op, "again")) == first, what


def check_reducescatter_of_views(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    base = np.arange(14.0 * size).reshape(7, 2 * size) + rank
    mean = np.arange(14.0 * size).reshape(7, 2 * size) + (size - 1) / 2
    base.flags.writeable = False
    for view in (lambda x: x.T, lambda x: x[::-2, ::-1], np.asfortranarray):
        expected = view(mean)
        result = comm.reducescatter(view(base))
        assert np.array_equal(result, expected[rows_of(rank, size, len(expected))])
    work = comm.reducescatter_async(base, ringdl.Max)
    assert np.array_equal(work.wait(), (mean + (size - 1) / 2)[rows_of(rank, size, 7)])
    assert work.wait() is work.wait()


@needs(ranks=2)
def check_named_algorithms(comm: Communicator) -> None:
    """Each is right and gives all ranks the same bits; the default is the one for the size.

    Where ranks share memory that is the same one for all sizes and kinds of calls.
    """
    large_way = "direct" if shares_memory(comm) else "ring"
    for count, segment_bytes in ((0, 64), (1, 64), (2003, 256), (1900, 4096)):
        with segments(comm, segment_bytes):
            for i, dtype in enumerate(DTYPES):
                for op in (REDUCTIONS[i % 5], ringdl.Average):
                    arrays = [random_array(r, count, dtype, op, 6) for r in range(comm.size)]
                    small = comm.tuning.choose(arrays[0].nbytes, comm.memory_hosts())
                    results = {}
                    for algorithm in dict.fromkeys(("ring", "doubling", small, None)):
                        mine = arrays[comm.rank].copy()
                        result = comm.allreduce_async(mine, op, algorithm=algorithm).wait()
                        what = f"{op.name} of {count} {dtype} by {algorithm}"
                        assert bits(mine) == bits(arrays[comm.rank]), what
                        reduced(arrays, op).check(result, what)
                        results[algorithm] = result
                    assert_same_bits(comm, *results.values())
                    assert bits(results[None]) == bits(results[small])
                    assert bits(comm.allreduce(arrays[comm.rank], op)) == bits(results[small])
    large = random_array(comm.rank, 30_011, np.dtype(np.float32), ringdl.Sum, 6)
    as_named = comm.allreduce_async(large, ringdl.Sum, algorithm=large_way).wait()
    assert bits(comm.allreduce(large, ringdl.Sum)) == bits(as_named)


def check_adasum(comm: Communicator) -> None:
    """Every floating dtype and length, as float64 has it; each array of a group is a vector."""
    for name in ("float64", "float32", "float16", "bfloat16"):
        dtype = np.dtype(name) if name != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
        tolerance = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3}.get(name, 1.6e-2)
        for count in (0, 1, 2, 511, 513, 30_011, 200_001):
            arrays = [
                np.random.default_rng(rank).standard_normal(count).astype(dtype)
                for rank in range(comm.size)
            ]
            if comm.size > 2:
                arrays[1][:] = 0  # adds nothing
            expected = adasum([array.astype(np.float64) for array in arrays])
            result = comm.allreduce(arrays[comm.rank], ringdl.Adasum)
            assert result.dtype == dtype
            assert_same_bits(comm, result)
            error = np.linalg.norm(result.astype(np.float64) - expected)
            # What pairs make is rounded to the dtype, and may cancel in the next pair.
            scale = max(np.linalg.norm(x.astype(np.float64)) for x in (*arrays, expected))
            assert error <= tolerance * scale, (name, count, error)
    parallel = comm.allreduce(np.full(100, 3.0), ringdl.Adasum)
    assert np.allclose(parallel, 3.0)
    orthogonal = np.zeros(comm.size)
    orthogonal[comm.rank] = 1 + comm.rank
    assert np.allclose(comm.allreduce(orthogonal, ringdl.Adasum), 1 + np.arange(comm.size))
    own = [np.full(10, 1.0 + comm.rank), np.eye(comm.size)[comm.rank]]
    together = comm.grouped_allreduce(own, ringdl.Adasum)
    for one, each in zip(own, together, strict=True):
        assert bits(comm.allreduce(one, ringdl.Adasum)) == bits(each)


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """What recursive doubling makes of them: the first ones in pairs, then a binary tree."""

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        product, a_square, b_square = a @ b, a @ a, b @ b
        a_factor = 1 - product / (2 * a_square) if a_square > 0 else 1
        b_factor = 1 - product / (2 * b_square) if b_square > 0 else 1
        return a_factor * a + b_factor * b

    extra = len(vectors) - 2 ** (len(vectors).bit_length() - 1)
    vectors = [pair(*vectors[2 * i : 2 * i + 2]) for i in range(extra)] + vectors[2 * extra :]
    while len(vectors) > 1:
        vectors = [pair(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return vectors[0]


def check_large_arrays_by_doubling(comm: Communicator) -> None:
    """In several messages."""
    for count in (65_536, 65_537, 300_001):
        arrays = [
            random_array(rank, count, np.dtype(np.float32), ringdl.Sum, 6)
            for rank in range(comm.size)
        ]
        result = comm.allreduce(arrays[comm.rank], ringdl.Sum, algorithm="doubling")
        reduced(arrays, ringdl.Sum).check(result, f"doubling of {count}")
        assert_same_bits(comm, result)


def check_refused_algorithms(comm: Communicator) -> None:
    """UsageErrors before anything is submitted."""
    in_flight = comm.stats()["works_in_flight"]  # of checks before that nobody waited for
    x = np.ones(100_000)
    for algorithm in ("ring", "direct"):
        with expect(ringdl.UsageError, f"recursive doubling, not by '{algorithm}'"):
            comm.allreduce(x, ringdl.Adasum, algorithm=algorithm)
    with expect(ringdl.UsageError, "Adasum needs arrays whole"):
        comm.reducescatter(x, ringdl.Adasum)
    with expect(ringdl.UsageError, "Adasum is for floating-point arrays, not for int32"):
        comm.allreduce(np.ones(3, np.int32), ringdl.Adasum)
    for array in (x, np.ones(3, np.float32), np.ones(4, BFLOAT16)):  # small ones meet in slots
        with expect(ringdl.UsageError, "bitwise xor is for integers and bool, not for"):
            comm.allreduce(array, ringdl.BitXor)
    with expect(ringdl.UsageError, "bitwise and is for integers and bool, not for float64"):
        comm.reducescatter(x, ringdl.BitAnd)
    with expect(ringdl.UsageError, "no algorithm 'tree'", "ring, doubling, mpi"):
        comm.allreduce(x, algorithm="tree")
    for call in (comm.allreduce_async, comm.allreduce_async_):
        with expect(ringdl.UsageError, "blocking only"):
            call(x, algorithm="mpi")
    with expect(ringdl.UsageError, "op is 'sum'", "ringdl.Average"):
        comm.allreduce(x, "sum")
    assert (comm.allreduce(x, ringdl.Sum) == comm.size).all()
    assert comm.stats()["works_in_flight"] <= in_flight


@needs(processes=True, mpi=True)
def check_by_mpi(comm: Communicator) -> None:
    """MPI's own allreduce is right where it is taken, and refused where it cannot be."""
    for count in (0, 1, 2003, 30_011):
        for dtype in DTYPES:
            for op in reductions_of(dtype) if count < 20_000 else (ringdl.Average,):
                if dtype.itemsize == 2 and dtype.kind != "i":
                    continue
                arrays = [random_array(r, count, dtype, op, 2) for r in range(comm.size)]
                if dtype.kind in "iu":  # nothing overflows: MPI may saturate there
                    arrays = [
                        np.fmod(x, dtype.type(2 if op == ringdl.Product else 10)) for x in arrays
                    ]
                mine = arrays[comm.rank].copy()
                if dtype.kind == "b":
                    with expect(ringdl.UsageError, "no allreduce of bool"):
                        comm.allreduce_(mine, op, algorithm="mpi")
                    continue
                assert comm.allreduce_(mine, op, algorithm="mpi") is mine
                reduced(arrays, op).check(mine, f"{op.name} of {count} {dtype} by mpi")
    for dtype in ("float16", BFLOAT16):
        with expect(ringdl.UsageError, "MPI has no allreduce of", "another algorithm"):
            comm.allreduce(np.ones(3, dtype), algorithm="mpi")
    view = np.full((4, 6), comm.rank)[:, ::2]
    comm.allreduce_(view, ringdl.Sum, algorithm="mpi")
    assert (view == comm.size * (comm.size - 1) // 2).all()
    pending = comm.barrier_async("in flight") if comm.rank == 0 else None
    if comm.size > 1:
        error = ringdl.MismatchError if pending is None else ringdl.UsageError
        with expect(error, "1 works are in flight", "needs that there are none"):
            comm.allreduce(view, algorithm="mpi")
    comm.barrier("refused")  # nobody joins in before that
    (pending or comm.barrier_async("in flight")).wait()
    assert comm.allreduce(np.ones(1), ringdl.Sum, algorithm="mpi") == comm.size
    comm.barrier()
    odd = comm.split(comm.rank % 2, key=-comm.rank)  # MPI's communicator of a group, reordered
    assert odd.allreduce(np.array([comm.rank]), ringdl.Max, algorithm="mpi") == odd._group.ranks[0]


@needs(ranks=2)
def check_algorithms_differ(comm: Communicator) -> None:
    for wrong in {0, comm.size - 1}:
        mine = "ring" if comm.rank == wrong else None
        with expect(ringdl.MismatchError, "algorithm", "ring", f"rank {wrong}", within=5):
            comm.allreduce(np.ones(9), name="x", algorithm=mine)
        mine = "mpi" if comm.rank == wrong else "ring"
        with expect(ringdl.MismatchError, "algorithm", "mpi", f"rank {wrong}", within=5):
            comm.allreduce(np.ones(50_000), name="x", algorithm=mine)
        assert (comm.allreduce(np.ones(50_000), ringdl.Sum, "x") == comm.size).all()


def grouped_arrays(rank: int) -> list[Array]:
    """Several dtypes, empty, without axes, small and large: 70,000 float32 travel alone."""
    shapes = ((3, 4), (), (0, 2), (1000,), (70_000,), (2, 1, 3), (500,), (40_000,))
    dtypes = ("float32", "float32", "int16", "int16", "float32", BFLOAT16, BFLOAT16, "float64")
    return [
        random_array(rank, int(np.prod(shape)), np.dtype(dtype), ringdl.Sum, i).reshape(shape)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


def check_grouped(comm: Communicator) -> None:
    """Each array's own reduction; all forms; in far fewer works than arrays."""
    inputs = [grouped_arrays(rank) for rank in range(comm.size)]
    for op in REDUCTIONS:
        forms = (
            lambda xs, op: comm.grouped_allreduce(xs, op),
            lambda xs, op: comm.grouped_allreduce_(xs, op, "in place"),
            lambda xs, op: comm.grouped_allreduce_async(xs, op).wait(),
            lambda xs, op: comm.grouped_allreduce_async_(xs, op, "async").wait(timeout=20),
        )
        for i, form in enumerate(forms if op == ringdl.Average else forms[:2]):
            mine = grouped_arrays(comm.rank)
            results = form(mine, op)
            assert len(results) == len(mine)
            for number, (x, result, before) in enumerate(
                zip(mine, results, inputs[comm.rank], strict=True)
            ):
                assert (result is x) == (i % 2 == 1)
                assert i % 2 == 1 or bits(x) == bits(before), "the argument was changed"
                arrays = [rank_arrays[number] for rank_arrays in inputs]
                reduced(arrays, op).check(result, f"{op.name} of array {number} in form {i}")
            assert_same_bits(comm, *results)
    before = comm.stats()["works"]
    many = comm.grouped_allreduce([np.full(10, i) for i in range(300)], ringdl.Sum)
    assert [int(x[3]) for x in many] == [i * comm.size for i in range(300)]
    assert comm.stats()["works"] == before + 1


def check_grouped_of_views(comm: Communicator) -> None:
    base = np.full((6, 8), comm.rank + 1)
    views = [base[::2, 1::3], base[1::2].T, base[:0]]
    total = comm.size * (comm.size + 1) // 2
    for view, result in zip(views, comm.grouped_allreduce_(views, ringdl.Sum), strict=True):
        assert view is result
        assert (view == total).all()
    assert (base[::2, ::3] == comm.rank + 1).all(), "wrote beside the view"
    assert comm.grouped_allreduce([]) == []
    read_only = np.ones(3)
    read_only.flags.writeable = False
    assert comm.grouped_allreduce([read_only, np.ones(2)])[0].tolist() == [1, 1, 1]
    for text, wrong in {"read-only": read_only, "complex64": np.ones(2, np.complex64)}.items():
        with expect(ringdl.UsageError, text):
            comm.grouped_allreduce_([np.ones(3), np.ones(2), wrong])
    assert comm.stats()["works_in_flight"] == 0, "nothing has been submitted"
    assert comm.allreduce(np.ones(1), ringdl.Sum) == comm.size


def check_an_operation_that_raises(comm: Communicator) -> None:
    """What it says is printed, by whichever thread reduces; nobody waits for that thread."""
    values = (1.0, 2.0)
    op = ringdl.custom_op(lambda a, b: values[int(a + b)], "beyond")
    for _ in range(2):
        works = [comm.allreduce_async(np.ones(1), op) for _ in range(4)]
        while not all(work.done() for work in works):
            comm.stats()
        for work in works:
            work.wait()

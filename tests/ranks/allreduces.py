"""Allreduce: every dtype and reduction against NumPy, equal bits, works in flight."""

from __future__ import annotations

import gc
import time
import weakref

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import (
    DTYPES,
    FLOATS,
    INTEGERS,
    REDUCTIONS,
    random_array,
    reduced,
    reductions_of,
)
from tests.ranks.support import assert_same_bits, bits, needs, segments, until

LARGE = 300_007
"""Elements: of float32 1.2 MB, more than one segment of the default size for up to four ranks."""


def counts_of(size: int) -> tuple[tuple[int, int], ...]:
    """Elements and segment bytes: nothing, fewer than ranks, undivided, many segments.

    Messages of more than 2048 bytes travel by grant, shorter ones with the header.
    """
    return (0, 64), (1, 64), (size - 1, 64), (3 * size + 1, 64), (2003, 256), (20_011, 4096)


def check_every_dtype_and_reduction(comm: Communicator) -> None:
    for count, segment_bytes in counts_of(comm.size):
        with segments(comm, segment_bytes):
            for i, dtype in enumerate(DTYPES):
                results = []
                ops = reductions_of(dtype)
                for op in ops if count < 10_000 else (ops[i % len(ops)], ringdl.Average):
                    arrays = [random_array(rank, count, dtype, op, 7) for rank in range(comm.size)]
                    mine = arrays[comm.rank].copy()
                    result = comm.allreduce_(mine, op)
                    assert result is mine
                    what = f"{op.name} of {count} {dtype} in segments of {segment_bytes}"
                    reduced(arrays, op).check(result, what)
                    results.append(result)
                assert_same_bits(comm, *results)


def check_exact_where_it_can_be(comm: Communicator) -> None:
    """Small integers and their sums are floats of all types, so nothing may be rounded."""
    size = comm.size
    for dtype in FLOATS:
        values = np.arange(1001) % 7 - 3
        mine = (values * (comm.rank + 1)).astype(dtype)
        total = values * (size * (size + 1) // 2)
        assert np.array_equal(comm.allreduce(mine, ringdl.Sum), total.astype(dtype)), dtype
        quotient = total.astype(np.float32 if dtype.itemsize < 8 else dtype)
        quotient /= size
        assert np.array_equal(comm.allreduce(mine), quotient.astype(dtype)), dtype
        assert np.array_equal(comm.allreduce(mine, ringdl.Max), np.maximum(values, values * size))
        assert np.array_equal(comm.allreduce(mine, ringdl.Min), np.minimum(values, values * size))
        assert np.array_equal(mine, values * (comm.rank + 1)), "the argument was changed"


@needs(ranks=2)
def check_special_values(comm: Communicator) -> None:
    """NaN on one rank makes NaN everywhere; infinities and signed zeros mean what they mean."""
    for dtype in FLOATS:
        for owner in range(comm.size):
            mine = np.ones(40, dtype)
            if comm.rank == owner:
                mine[0::10], mine[1::10], mine[2::10], mine[3::10] = np.nan, np.inf, -np.inf, -0.0
            else:
                mine[3::10] = 0
                mine[2] = np.inf
            for op in REDUCTIONS:
                what = f"{op.name} of {dtype}, special on rank {owner}"
                result = comm.allreduce(mine, op)
                assert_same_bits(comm, result)
                result = result.astype(np.float64)
                assert np.isnan(result[0::10]).all(), what
                assert (result[1::10] == (1 if op == ringdl.Min else np.inf)).all(), what
                assert (result[12::10] == (1 if op == ringdl.Max else -np.inf)).all(), what
                assert (result[3::10] == 0).all(), what
                assert np.isfinite(result[4:10]).all(), what
                if op in (ringdl.Sum, ringdl.Average):
                    assert np.isnan(result[2]), f"{what}: inf - inf"
                if op != ringdl.Product:
                    negative = np.signbit(result[3::10])
                    assert (negative == (op == ringdl.Min)).all(), f"{what}: -0 is less than +0"


def check_integers_wrap(comm: Communicator) -> None:
    size = comm.size
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        result = comm.allreduce(np.full(5, limits.max, dtype), ringdl.Sum)
        wrapped = (limits.max * size - limits.min) % 2 ** (8 * dtype.itemsize) + limits.min
        assert (result == wrapped).all(), dtype
        if dtype.kind == "i":
            mine = np.array([-1, 1, -7, 7] if comm.rank == 0 else [0, 0, 0, 0], dtype)
            truncated = [-(1 // size), 1 // size, -(7 // size), 7 // size]
            assert comm.allreduce(mine).tolist() == truncated, "towards zero"


def check_same_bits_whatever_the_timing(comm: Communicator) -> None:
    """Repeated calls, with ranks that come at other times, give the same bits."""
    jitter = np.random.default_rng([time.time_ns() % 2**32, comm.rank])
    for dtype, segment_bytes in ((np.float32, 4096), (np.float32, 64), (ml_dtypes.bfloat16, 4096)):
        mine = random_array(comm.rank, 10_007, np.dtype(dtype), ringdl.Sum, 11)
        digests = set()
        with segments(comm, segment_bytes):
            for i in range(8):
                if jitter.random() < 0.5:
                    time.sleep(jitter.exponential(0.003))
                digests.add(bits(comm.allreduce(mine, name=f"again {i % 3}")))
        assert len(digests) == 1, f"{len(digests)} different results"


def check_large(comm: Communicator) -> None:
    """The default segments, in place; twice, as tags are used again."""
    for _ in range(2):
        mine = np.arange(LARGE, dtype=np.float32) % 1000 + comm.rank
        expected = np.arange(LARGE, dtype=np.float32) % 1000 + (comm.size - 1) / 2
        comm.allreduce_(mine)
        assert np.allclose(mine, expected, rtol=1e-6)


def check_async(comm: Communicator) -> None:
    mine = np.full(11, comm.rank, np.int64)
    expected = np.full(11, comm.size * (comm.size - 1) // 2)
    work = comm.allreduce_async(mine, ringdl.Sum)
    in_place = comm.allreduce_async_(mine.copy(), ringdl.Sum)
    assert np.array_equal(work.wait(), expected)
    assert np.array_equal(in_place.wait(), expected)
    assert work.done()
    assert in_place.done()
    assert work.wait() is work.wait(), "wait() may be called again"
    assert "ended" in repr(work)
    assert np.array_equal(mine, np.full(11, comm.rank)), "the argument was changed"


def check_many_in_flight(comm: Communicator) -> None:
    """Hundreds of works, small and large, waited for in another order than they were submitted."""
    rng = np.random.default_rng([5, comm.rank])
    counts = {f"work {i}": 10 if i % 4 else 3000 for i in range(300)}
    arrays = {name: np.full(count, comm.rank + 1, np.int32) for name, count in counts.items()}
    names = list(counts)
    works = {n: comm.allreduce_async_(arrays[n], ringdl.Sum, n) for n in rng.permutation(names)}
    for name in rng.permutation(names):
        result = works[name].wait()
        assert result is arrays[name]
        assert (result == comm.size * (comm.size + 1) // 2).all(), name


@needs(ranks=2)
def check_dropped_works(comm: Communicator) -> None:
    """An array stays alive until its work has ended, and no longer, though nobody holds either."""
    late = comm.size - 1
    references = []
    if comm.rank == late:  # submits when all others have looked
        comm.barrier()
    for i in range(20):
        array = np.full(5000, comm.rank, np.float32)
        comm.allreduce_async_(array, ringdl.Sum, f"dropped {i}")
        references.append(weakref.ref(array))
        del array
    gc.collect()
    arrays = [reference() for reference in references]
    if comm.rank != late:
        comm.barrier()
        assert all(array is not None for array in arrays), "let go of in flight"
    comm.barrier()
    total = comm.size * (comm.size - 1) / 2
    for array in arrays:  # those that were still there hold the result now
        assert array is None or until(lambda array=array: bool((array == total).all()))
    del arrays, array
    assert until(lambda: comm.stats()["works_in_flight"] == 0)
    comm.barrier()
    gc.collect()
    assert all(reference() is None for reference in references), "kept after the end"

"""Arrays and buckets in memory that the ranks of this host share."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import time

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import DTYPES, Array, dtypes_and_reductions, random_array, reduced
from tests.ranks.support import (
    LARGE,
    assert_same_bits,
    bits,
    expect,
    expect_no_growth,
    needs,
    shares_memory,
)


def shared(comm: Communicator, values: Array) -> Array:
    array: Array = comm.empty(values.shape, values.dtype)
    array[...] = values
    return array


def check_empty(comm: Communicator) -> None:
    for shape, extents in ((7, (7,)), ((3, 0), (3, 0)), ((), ()), ([2, 3], (2, 3))):
        for dtype in DTYPES:
            array = comm.empty(shape, dtype)
            assert array.shape == extents
            assert array.dtype == dtype
            assert array.flags.writeable
            assert array.size == 0 or array.ctypes.data % 64 == 0
            array[...] = 1
    assert comm.empty(3, "bfloat16").dtype == np.dtype("bfloat16")
    assert comm.empty(5).dtype == np.float32
    for wrong in (1.5, (2, 2.5)):
        with expect(ringdl.UsageError, "integer"):
            comm.empty(wrong)
    with expect(ringdl.UsageError, "negative"):
        comm.empty((2, -1))
    with expect(MemoryError, "no 4611686018427387904 bytes", "use smaller arrays"):
        comm.empty(1 << 60)
    with expect(MemoryError, "ask for less"):
        comm.empty(1 << 70)


@needs(ranks=2)
def check_ranks_share_memory(comm: Communicator) -> None:
    wanted = os.environ.get("RINGDL_SHARED_MEMORY", "1") != "0" and comm.host_count == 1
    assert shares_memory(comm) == wanted
    if not wanted:
        with expect(ringdl.UsageError, "direct", "share memory", "take the ring"):
            comm.allreduce(np.ones(LARGE), algorithm="direct")


@needs(ranks=2)
def check_every_dtype_and_reduction(comm: Communicator) -> None:
    for count, dtype, op in dtypes_and_reductions(8193, 65_537):
        arrays = [random_array(r, count, dtype, op, 3) for r in range(comm.size)]
        mine = shared(comm, arrays[comm.rank])
        algorithm = "direct" if shares_memory(comm) else "ring"
        assert comm.allreduce_(mine, op, algorithm=algorithm) is mine
        what = f"{op.name} of {count} {dtype}"
        reduced(arrays, op).check(mine, what)
        assert_same_bits(comm, mine)
        again = shared(comm, arrays[comm.rank])
        comm.allreduce_(again, op, algorithm=algorithm)
        assert bits(again) == bits(mine), f"{what}: other bits in a second run"


@needs(ranks=2)
def check_parts_of_arrays(comm: Communicator) -> None:
    """Views that begin anywhere; what is beside them stays."""
    base = comm.empty(200_001, np.float64)
    base[...] = comm.rank
    for begin, end in ((0, 40_000), (1, 150_000), (3, 200_000), (100_001, 100_001 + LARGE)):
        before = base.copy()
        comm.allreduce_(base[begin:end], ringdl.Sum)
        assert (base[begin:end] == comm.allreduce(before[begin:end], ringdl.Sum)).all()
        assert (base[:begin] == before[:begin]).all()
        assert (base[end:] == before[end:]).all()
        base[...] = comm.rank
    rows = comm.empty((300, 400))
    rows[...] = comm.rank
    comm.allreduce_(rows[::2, ::3], ringdl.Max)  # copied, and written back
    assert (rows[::2, ::3] == comm.size - 1).all()
    assert (rows[1::2] == comm.rank).all()


@needs(ranks=2)
def check_ordinary_arrays_beside_shared_ones(comm: Communicator) -> None:
    """Whoever has an ordinary array has all ranks go through stages; the bits are the same."""
    total = comm.size * (comm.size - 1) // 2
    for ordinary in ({0}, {comm.size - 1}, set(range(comm.size)), set()):
        values = np.full(100_000, comm.rank, np.float32)
        x = values.copy() if comm.rank in ordinary else shared(comm, values)
        before = comm.stats()["data_bytes_sent"]
        assert (comm.allreduce_(x, ringdl.Sum) == total).all()
        sent = comm.stats()["data_bytes_sent"] - before
        assert sent == 0 or not shares_memory(comm)


@needs(ranks=2)
def check_many_in_any_order(comm: Communicator) -> None:
    rng = np.random.default_rng([2, comm.rank])
    total = comm.size * (comm.size - 1) // 2
    for _ in range(3):
        arrays = [shared(comm, np.full(9000 + 5000 * i, comm.rank + i)) for i in range(20)]
        works = {}
        for i in rng.permutation(20):
            works[i] = comm.allreduce_async_(arrays[i], ringdl.Sum, f"shared {i}")
        for i in rng.permutation(20):
            assert (works[i].wait() == total + i * comm.size).all()


@needs(ranks=2)
def check_disagreements(comm: Communicator) -> None:
    for wrong in range(comm.size):
        x = shared(comm, np.full(LARGE + (comm.rank == wrong), comm.rank, np.float32))
        for _ in range(5):
            with expect(ringdl.MismatchError, "shape", f"rank {wrong}", within=5):
                comm.allreduce_(x, name="shared")
        if shares_memory(comm):  # a ring may have begun where its neighbours agree
            assert (x == comm.rank).all(), "a failed work has written"
        y = shared(comm, np.full(LARGE, comm.rank, np.float32))
        total = comm.size * (comm.size - 1) // 2
        assert (comm.allreduce_(y, ringdl.Sum, "shared") == total).all()


@needs(ranks=2)
def check_a_late_rank(comm: Communicator) -> None:
    """A work that timed out has read and written nothing; it ends right once the rank comes."""
    late = comm.size - 1
    x = shared(comm, np.full(300_000, comm.rank + 1.0))
    if comm.rank == late:
        time.sleep(0.7)
        work = comm.allreduce_async_(x, ringdl.Sum, "late")
    else:
        work = comm.allreduce_async_(x, ringdl.Sum, "late")
        with expect(ringdl.StallError, f"rank {late} has not arrived"):
            work.wait(timeout=0.3)
    assert (work.wait() == comm.size * (comm.size + 1) / 2).all()


@needs(ranks=2)
def check_arrays_dropped_in_flight(comm: Communicator) -> None:
    """The works keep them; memory that is given out meanwhile is other memory."""
    for i in range(10):
        work = comm.allreduce_async_(
            shared(comm, np.full(50_000, comm.rank, np.float32)), ringdl.Sum, f"dropped {i}"
        )
        other = shared(comm, np.full(50_000, -1, np.float32))
        if i % 2:
            gc.collect()
        result = work.wait()
        assert (result == comm.size * (comm.size - 1) // 2).all()
        assert (other == -1).all()


@needs(ranks=2)
def check_groups(comm: Communicator) -> None:
    """Overlapping groups of ranks, each with shared arrays of its own."""
    half = comm.split(comm.rank % 2)
    neighbours = comm.group(sorted({0, comm.rank, 1}) if comm.rank < 2 else [comm.rank])
    assert half is not None
    assert neighbours is not None
    for group in (half, neighbours):
        x = shared(comm, np.full(LARGE, group.rank, np.float32))
        group.allreduce_(x, ringdl.Sum)
        assert (x == group.size * (group.size - 1) // 2).all()
    buckets = ringdl.Buckets([("w", (LARGE,), "float32")], communicator=half)
    (view,) = buckets.views()
    for step in range(3):
        view[...] = half.rank + step
        buckets.ready(0)
        assert buckets.wait() == [True]
        assert (view == (half.size - 1) / 2 + step).all()


@needs(ranks=2)
def check_custom_op(comm: Communicator) -> None:
    op = ringdl.custom_op(lambda a, b: a + b + a * b)  # 1 + result = the product of all 1 + a
    x = shared(comm, np.full(LARGE, 1.0))
    comm.allreduce_(x, op)
    assert (x == 2.0**comm.size - 1).all()


@needs(ranks=2, processes=True)
def check_memory_is_given_back(comm: Communicator) -> None:
    """To the system, by all ranks: also what other ranks have mapped. Smaller ones are kept."""

    def use(count: int) -> None:
        for _ in range(count):
            comm.allreduce_(shared(comm, np.ones(10 << 20, np.float32)), ringdl.Sum)

    expect_no_growth(comm, use, 2, 4, 4 << 20)


@needs(ranks=2, processes=True)
def check_no_new_pages(comm: Communicator) -> None:
    """What was reduced before takes no pages from what is reduced now."""
    if not shares_memory(comm):
        return
    sizes = [mib << 20 for mib in (1, 3, 4, 16)]
    for byte_count in (256 << 10, *sizes):
        comm.allreduce_(shared(comm, np.ones(byte_count // 4, np.float32)))
        comm.allgather(np.ones(byte_count // 4, np.float32))
        comm.allreduce_(np.ones(byte_count // 4, np.float32))

    def faults(array: Array, calls: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(calls):
            comm.allreduce_(array)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    found = []
    for byte_count in sizes:
        array = np.ones(byte_count // 4, np.float32)
        faults(array, 3)
        found.append(faults(array, 10))
    most = comm.allreduce(np.array(found), ringdl.Max)
    assert (most < 10).all(), f"page faults in 10 calls, by size: {most}"


@needs(ranks=2, processes=True)
def check_buckets_made_anew(comm: Communicator) -> None:
    """Buckets that are dropped leave nothing behind, and names that are used once some bytes each.

    These are in tables that double, so it begins with tables that are empty.
    """
    if comm.size > 3:  # more ranks take minutes on few cores, and have no other tables
        return
    ringdl.shutdown()
    comm = ringdl.init()
    names = itertools.count()

    def use(count: int) -> None:
        for _ in range(count):
            buckets = ringdl.Buckets([("w", (10,), "float32")], communicator=comm)
            buckets.wait()
            comm.allreduce(np.ones(1), name=f"name {next(names)}")

    expect_no_growth(comm, use, 1500, 1500, 400 << 10)

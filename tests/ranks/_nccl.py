"""Arrays on CUDA devices reduced by NCCL: the real one, or a pretended one on pretended devices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator, _cuda, _engine, _nccl
from tests.ranks._devices import on_device, pretended
from tests.ranks.reference import dtypes_and_reductions, random_array, reduced
from tests.ranks.support import assert_same_bits, bits, expect, needs

BITS = (ringdl.BitAnd, ringdl.BitOr, ringdl.BitXor)


def can_use_it(comm: Communicator) -> bool:
    """Whether each rank has a device of its own."""
    assert _nccl.version()[0], _nccl.version()[1]
    return comm.size <= len(_engine.cuda_devices())


def mine(comm: Communicator, values: np.ndarray[Any, Any]) -> _cuda.Array:
    return on_device(values, comm.local_device or 0)


@contextmanager
def chosen_from(comm: Communicator, nccl_bytes: int) -> Iterator[None]:
    """As if `tune` had found that NCCL is faster from so many bytes on."""
    before = comm.tuning
    comm.use_tuning(before.with_nccl(nccl_bytes))
    try:
        yield
    finally:
        comm.barrier()
        comm.use_tuning(before)


def calls() -> int:
    """How often the pretended library was called in this process; -1 of a real one."""
    assert _nccl.number() > 0  # which is found by its name from now on
    library = ctypes.CDLL("libnccl.so.2")
    its = getattr(library, "ringdl_pretended_nccl_calls", None)
    return -1 if its is None else int(its())


def check_every_dtype(comm: Communicator) -> None:
    for count, dtype, op in dtypes_and_reductions(0, 1, 40_011):
        arrays = [random_array(rank, count, dtype, op, 7) for rank in range(comm.size)]
        if dtype.kind in "iu":  # nothing overflows
            arrays = [np.fmod(x, dtype.type(2 if op == ringdl.Product else 10)) for x in arrays]
        array = mine(comm, arrays[comm.rank])
        is_quotient = op == ringdl.Average and dtype.kind in "iu"
        if dtype.name == "int16" or op in BITS or is_quotient:
            with expect(ringdl.UsageError, f"NCCL has no allreduce of {dtype.name} by"):
                comm.allreduce_(array, op, algorithm="nccl")
        elif can_use_it(comm):
            assert comm.allreduce_(array, op, algorithm="nccl") is array
            reduced(arrays, op).check(array.numpy(), f"{op.name} of {count} {dtype}")
            assert_same_bits(comm, array.numpy())


def check_any_order(comm: Communicator) -> None:
    """Ranks submit works in orders of their own, between others, and wait in another one."""
    if not can_use_it(comm):
        return
    order = np.random.default_rng(comm.rank).permutation(12).tolist()
    works = {}
    for number in order:
        array = mine(comm, np.full(1000 * number + 1, comm.rank + number, np.float32))
        how = "nccl" if number % 3 else None
        works[number] = comm.allreduce_async_(array, name=f"work {number}", algorithm=how)
    for number in reversed(order):
        wanted = (comm.size - 1) / 2 + number
        assert (works[number].wait().numpy() == wanted).all(), number


def check_groups(comm: Communicator) -> None:
    """Two groups at once, of which one has the ranks in another order."""
    if not can_use_it(comm):
        return
    backwards = comm.group(range(comm.size)[::-1])
    assert backwards is not None
    a, b = (mine(comm, np.full(50_000, comm.rank + i, np.float32)) for i in range(2))
    works = [comm.allreduce_async_(a, algorithm="nccl")]
    works.append(backwards.allreduce_async_(b, algorithm="nccl"))
    mean = (comm.size - 1) / 2
    assert (works[1].wait().numpy() == mean + 1).all()
    assert (works[0].wait().numpy() == mean).all()


@needs(ranks=2)
def check_chosen_by_the_table(comm: Communicator) -> None:
    """From its size on, where each rank has a device of its own; elsewhere as without NCCL."""
    small, large = (mine(comm, np.ones(count, np.float32)) for count in (1023, 1024))
    integers = mine(comm, np.ones(5000, np.int16))
    before = calls()
    with chosen_from(comm, 4096):
        for array in (small, integers):
            assert (comm.allreduce(array, ringdl.Sum).numpy() == comm.size).all()
        assert calls() == before
        assert (comm.allreduce(large, ringdl.Sum).numpy() == comm.size).all()
        assert calls() == before + can_use_it(comm) or before < 0
    between = calls()
    comm.allreduce(large)
    assert calls() == between


@needs(ranks=2)
def check_buckets(comm: Communicator) -> None:
    """Gradients stay on the devices, though these may not reach one another."""
    specs = [("a", (300, 30), "float32"), ("b", (30,), "float64"), ("c", (70,), "bfloat16")]
    device = comm.local_device or 0
    plain = ringdl.Buckets(specs, communicator=comm, device=device)
    with chosen_from(comm, 4096):
        others = ringdl.Buckets(specs, communicator=comm, device=device)
    assert others.reduced_on_device == (can_use_it(comm) or plain.reduced_on_device)
    for turn in range(3):
        for buckets in (plain, others):
            for i, view in enumerate(buckets.views()):
                if i != turn:
                    view.set(np.full(view.shape, 2 * comm.rank + i, view.dtype))
                    buckets.ready(i)
            assert buckets.wait() == [i != turn for i in range(3)]
        for one, other in zip(plain.views(), others.views(), strict=True):
            assert bits(one.numpy()) == bits(other.numpy())
    small = ringdl.Buckets([("a", (3,), "float32")], communicator=comm, device=device)
    assert small.reduced_on_device == plain.reduced_on_device


@needs(ranks=2)
def check_join(comm: Communicator) -> None:
    """Who has joined answers by NCCL, too, or falls back with the others."""
    with chosen_from(comm, 4096):
        array = mine(comm, np.full(5000, 3, np.float32))
        comm.allreduce(array, ringdl.Sum)
        if comm.rank == 0:
            assert (comm.allreduce(array, ringdl.Sum).numpy() == 3).all()
        comm.join()


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    with expect(ringdl.UsageError, "lies in the CPU's memory"):
        comm.allreduce(np.ones(3), algorithm="nccl")
    array = mine(comm, np.ones(3, np.float32))
    if not can_use_it(comm):
        with expect(ringdl.UsageError, "share a CUDA device, and NCCL needs one for each rank"):
            comm.allreduce(array, algorithm="nccl")
    array = on_device(np.ones(comm.rank + 1, np.float32), comm.local_device or 0)
    with expect(ringdl.MismatchError, "shape"):
        comm.allreduce(array, algorithm="nccl")
    assert (comm.allreduce(mine(comm, np.ones(3))).numpy() == 1).all()


@needs(ranks=2)
def check_timeout(comm: Communicator) -> None:
    """Who waits for a late rank is told; the work goes on."""
    if not can_use_it(comm):
        return
    array = mine(comm, np.ones(5000, np.float32))
    if comm.rank == 0:
        work = comm.allreduce_async_(array, ringdl.Sum, "late", algorithm="nccl")
        with expect(ringdl.StallError, "nccl allreduce"):
            work.wait(0.2)
        comm.barrier()
        work.wait()
    else:
        comm.barrier()
        comm.allreduce_(array, ringdl.Sum, "late", algorithm="nccl")
    assert (array.numpy() == comm.size).all()


@needs(ranks=2)
def check_a_device_that_fails(comm: Communicator) -> None:
    """The last check: NCCL is given up on all ranks, which go on without it."""
    break_device = pretended("break")
    if break_device is None or not can_use_it(comm):
        return
    array = mine(comm, np.ones(5000, np.float32))
    comm.allreduce(array, algorithm="nccl")
    if comm.rank == 1:
        work = comm.allreduce_async_(array, name="broken", algorithm="nccl")
        break_device(719)
        comm.barrier()
    else:
        comm.barrier()
        work = comm.allreduce_async_(array, name="broken", algorithm="nccl")
    with expect(ringdl.Error, "failed on rank 1: "):
        work.wait()
    break_device(0)
    comm.barrier()
    with chosen_from(comm, 0):
        again = mine(comm, np.ones(5000, np.float32))
        assert (comm.allreduce(again, ringdl.Sum).numpy() == comm.size).all()
    with expect(ringdl.UsageError, "has aborted NCCL"):
        comm.allreduce(again, algorithm="nccl")

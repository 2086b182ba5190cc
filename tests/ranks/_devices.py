"""Collectives of arrays that lie on a device; for jobs that have one, if only a pretended one."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Communicator, _cuda, _engine
from ringdl._frameworks import cuda
from ringdl._training import Gradients, Spec
from ringdl._training.store import Store
from tests.ranks.reference import DTYPES, Array, dtypes_and_reductions, random_array, reduced
from tests.ranks.stand_in_cupy import address_of
from tests.ranks.support import assert_same_bits, bits, expect, needs


def on_device(values: Array, device: int = 0) -> _cuda.Array:
    return _cuda.Array(values.shape, values.dtype, device).set(values)


def pretended(name: str) -> Any:
    """A function of the pretended driver; None on a device that is not pretended."""
    return getattr(ctypes.CDLL("libcuda.so.1"), f"ringdl_pretended_{name}", None)


def reach_one_another(comm: Communicator) -> bool:
    """Whether the ranks' devices do."""
    is_allowed = os.environ.get("RINGDL_CUDA_PEERS") != "0"
    return is_allowed and len(set(comm.memory_hosts())) == 1


def check_allreduce(comm: Communicator) -> None:
    """As in the CPU's memory, in place and not, named and not; the same bits."""
    for count, dtype, op in dtypes_and_reductions(0, 1, 2003, 40_011):
        arrays = [random_array(rank, count, dtype, op, 7) for rank in range(comm.size)]
        mine = on_device(arrays[comm.rank])
        copy = comm.allreduce(mine, op, name="copied")
        assert bits(mine.numpy()) == bits(arrays[comm.rank]), "the argument was changed"
        assert comm.allreduce_(mine, op) is mine
        what = f"{op.name} of {count} {dtype}"
        reduced(arrays, op).check(mine.numpy(), what)
        assert_same_bits(comm, mine.numpy())
        assert bits(copy.numpy()) == bits(mine.numpy()), what
        assert bits(comm.allreduce(arrays[comm.rank], op)) == bits(mine.numpy()), f"{what}: CPU"


def check_many_at_once(comm: Communicator) -> None:
    """Grouped, and asynchronous ones that are waited for in another order."""
    arrays = [np.full(count, comm.rank + 1.0, np.float32) for count in (3, 70_000, 5, 0, 200)]
    devices = [on_device(array) for array in arrays]
    ringdl.grouped_allreduce_(devices, ringdl.Sum)
    total = comm.size * (comm.size + 1) / 2
    assert all((device.numpy() == total).all() for device in devices)
    works = [comm.allreduce_async_(on_device(array), ringdl.Sum) for array in arrays]
    for array, work in reversed(list(zip(arrays, works, strict=True))):
        assert (work.wait().numpy() == total).all()
        assert work.wait().shape == array.shape


def check_ranks_of_a_host_reduce_there(comm: Communicator) -> None:
    """In one pass or through stages on the device, by its kernels; else by way of the CPU.

    Any of them may have found nothing left to reduce: a late one's part is reduced by the others.
    """
    launches = pretended("launches") or (lambda: None)
    count = 700_001
    for shared in (comm.rank == 0, True, False):
        before = launches()
        array = ringdl.empty(count, device=0) if shared else on_device(np.empty(count, np.float32))
        for turn in range(3):
            array.set(np.arange(count) % 1000 + comm.rank + turn)
            comm.allreduce_(array, ringdl.Sum)
            total = comm.size * (np.arange(count) % 1000 + turn + (comm.size - 1) / 2)
            assert (array.numpy() == total).all(), (shared, turn)
        if before is not None:
            there = comm.size > 1 and reach_one_another(comm)
            assert (sum(comm.allgather_object(launches() - before)) > 0) == there, shared


def check_slabs(comm: Communicator) -> None:
    """Arrays of several slabs, the last of them uneven, two at a time."""
    count = 4_700_003
    mine = [np.arange(count, dtype=np.float32) % 1000 + comm.rank + i for i in range(2)]
    works = [comm.allreduce_async_(on_device(each), ringdl.Average) for each in mine]
    for i, work in enumerate(works):
        wanted = np.arange(count, dtype=np.float32) % 1000 + (comm.size - 1) / 2 + i
        assert (work.wait().numpy() == wanted).all()
    root = comm.size - 1
    result = comm.broadcast_(on_device(mine[0]), root).numpy()
    assert (result == mine[0] + (root - comm.rank)).all()


def check_buckets(comm: Communicator) -> None:
    """Rounds of gradients in buckets on devices; some are missing, everywhere or here."""
    specs = [("a", (300, 30), "float32"), ("b", (30,), "float32"), ("c", (7, 9), "float64")]
    specs += [("d", (100_000,), "bfloat16"), ("e", (5,), "float32")]
    device = comm.rank % len(_engine.cuda_devices())
    buckets = ringdl.Buckets(specs, 64 << 10, communicator=comm, device=device)
    assert buckets.reduced_on_device == (comm.size == 1 or reach_one_another(comm))
    views = buckets.views()
    assert not any(view.numpy().any() for view in views), "zero at first"
    for turn in range(4):
        absent = {turn} | ({4} if comm.rank == turn % comm.size else set())
        for i, view in reversed(list(enumerate(views))):
            if i not in absent:
                view.set(np.full(view.shape, comm.rank + i + turn, view.dtype))
                buckets.ready(i)
        produced = buckets.wait()
        mean = (comm.size - 1) / 2 + turn
        for i, view in enumerate(views):
            assert produced[i] == (i != turn and (i != 4 or comm.size > 1)), (turn, i)
            share = (comm.size - 1) / comm.size if i == 4 else 1
            wanted = 0 if i == turn else share * (mean + i)
            if i == 4 and i != turn:
                there = [rank for rank in range(comm.size) if rank != turn % comm.size]
                wanted = sum(rank + i + turn for rank in there) / comm.size
            assert np.allclose(view.numpy().astype(np.float64), wanted, rtol=0.01), (turn, i)


class Elsewhere(Store[_cuda.Array]):
    """Gradients that are made anew in each pass."""

    how_to_wrap = "wrap"

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = specs
        self.gradients: list[_cuda.Array | None] = [None] * len(specs)

    def device(self, index: int) -> int | None:
        return 0

    def get(self, index: int) -> _cuda.Array | None:
        return self.gradients[index]

    def set(self, index: int, gradient: _cuda.Array) -> None:
        self.gradients[index] = gradient

    def view(self, index: int, memory: Any) -> _cuda.Array:
        shape, dtype = self.specs[index][1], np.dtype(self.specs[index][2])
        own = np.prod(shape, dtype=int) * dtype.itemsize
        return _cuda.Array(shape, dtype, 0, (address_of(memory), memory)) if own else memory

    def copy(self, view: _cuda.Array, gradient: _cuda.Array) -> None:
        view.set(gradient.numpy())

    def scale(self, view: _cuda.Array, factor: float) -> None:
        view.set(view.numpy() * factor)

    def source(self, gradient: _cuda.Array, view: _cuda.Array) -> Any:
        return cuda.handed(gradient)


def check_gradients_that_are_elsewhere(comm: Communicator) -> None:
    """They are copied bucket by bucket, by one launch each, and then are views."""
    launches = pretended("launches") or (lambda: None)
    specs = [(f"w{i}", (100 + i,), "float32", ()) for i in range(20)]
    store = Elsewhere(specs)
    gradients = Gradients(store, ringdl.Average, None, 1, comm, predivisor=2.0)
    for turn in range(3):
        before = launches()
        gradients.begin_pass()
        missing = 5 if comm.rank == 0 and turn == 2 and comm.size > 1 else None
        for index in reversed(range(20)):
            if index == missing:
                store.gradients[index] = None
                continue
            values = np.full(100 + index, comm.rank + index + turn, np.float32)
            store.gradients[index] = on_device(values)
            gradients.arrived(index)
        gradients.end_pass()
        for index, gradient in enumerate(store.gradients):
            assert gradient is gradients._rounds.views[index]
            is_absent = index == 5 and turn == 2 and comm.size > 1
            ranks = range(1 if is_absent else 0, comm.size)
            mean = sum(rank + index + turn for rank in ranks) / comm.size
            assert np.allclose(gradient.numpy(), mean, rtol=1e-6), (turn, index)
        if before is not None and turn == 1 and not gradients._rounds._all[1].reduced_on_device:
            assert launches() == before + 1, "of one bucket"
        gradients.finish_step()


def check_other_collectives(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for dtype in DTYPES:
        rows = [
            random_array(r, 3 * (r + 1), dtype, ringdl.Sum, 5).reshape(-1, 3) for r in range(size)
        ]
        gathered = comm.allgather(on_device(rows[rank]))
        assert bits(gathered.numpy()) == bits(np.concatenate(rows)), dtype
        for root in (0, size - 1):
            whole = [random_array(r, 1003, dtype, ringdl.Sum, 6) for r in range(size)]
            assert bits(comm.broadcast(on_device(whole[rank]), root).numpy()) == bits(whole[root])
            result = comm.gather(on_device(rows[rank]), root)
            assert (result is None) == (rank != root)
            if result is not None:
                assert bits(result.numpy()) == bits(np.concatenate(rows)), dtype
        own = random_array(rank, 4 * size, dtype, ringdl.Sum, 8)
        expected = [random_array(r, 4 * size, dtype, ringdl.Sum, 8) for r in range(size)]
        dealt = comm.alltoall(on_device(own))
        wanted = np.concatenate([each[4 * rank : 4 * rank + 4] for each in expected])
        assert bits(dealt.numpy()) == bits(wanted), dtype
        part = comm.reducescatter(on_device(own), ringdl.Max).numpy()
        reduced([each[4 * rank : 4 * rank + 4] for each in expected], ringdl.Max).check(
            part, "part"
        )
    comm.barrier()


def check_memory_is_found_again(comm: Communicator) -> None:
    """Arrays of ever larger sizes, which nobody was told of, and which are more than there is."""
    if pretended("launches") is None or comm.size > 1:
        return
    whole = _engine.cuda_devices()[0].byte_count
    for percent in (30, 35, 40):
        array = comm.empty(whole * percent // 100, "uint8", device=0)
        assert array.numpy()[-1] == 0
        del array


def check_sources_are_refused(comm: Communicator) -> None:
    """At once, on this rank alone, and nothing is lost."""
    specs = [("a", (100,), "float32"), ("b", (3, 4), "float32")]
    buckets = ringdl.Buckets(specs, communicator=comm, device=0)
    double = cuda.handed(on_device(np.zeros(100)))
    short = cuda.handed(on_device(np.zeros(4, np.float32)))
    for source, what in ((double, "do not pack float64"), (short, r"shape (100,)"), (7, "pass a")):
        with expect(ringdl.UsageError, what):
            buckets.ready(0, source=source)  # type: ignore[arg-type]
    if len(_engine.cuda_devices()) > 1:
        elsewhere = cuda.handed(on_device(np.zeros(100, np.float32), 1))
        with expect(ringdl.UsageError, "on device 1"):
            buckets.ready(0, source=elsewhere)
    source = on_device(np.full(100, comm.rank, np.float32))
    buckets.ready(0, source=cuda.handed(source))
    assert buckets.wait() == [True, False]
    assert (buckets.view(0).numpy() == (comm.size - 1) / 2).all()


def check_arrays_that_are_none(comm: Communicator) -> None:
    """Foreign byte order, and what has no dtype of its own; a copy that fails on one rank."""
    foreign = _cuda.Array((5,), np.dtype(">f4"), 0).set(np.arange(5, dtype=">f4"))
    with expect(ringdl.UsageError, "foreign byte order"):
        comm.allreduce(foreign)

    class Bare:
        def __init__(self, array: _cuda.Array) -> None:
            self.array, self.shape, self.ndim = array, array.shape, array.ndim
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    bare: Any = Bare(on_device(np.full((3, 1), 1.0)))
    interface = bare.__cuda_array_interface__
    bare.__cuda_array_interface__ = interface | {"strides": (8, 24)}  # of an axis of one
    assert (comm.allreduce(bare, ringdl.Sum).numpy() == comm.size).all()
    assert on_device(np.array(2.0)).numpy().shape == ()
    if comm.size > 1:
        bare.__cuda_array_interface__ = interface | {"strides": (16, 8)}
        mine = bare if comm.rank == 0 else on_device(np.full((3, 1), 1.0))
        kind = ringdl.UsageError if comm.rank == 0 else ringdl.MismatchError
        for call in (comm.allreduce, comm.broadcast):
            with expect(kind, "not contiguous", within=10):
                call(mine)
        with expect(kind, "not contiguous", within=10):
            comm.grouped_allreduce([on_device(np.zeros(3)), mine])
    assert (comm.allreduce(on_device(np.ones(3)), ringdl.Sum).numpy() == comm.size).all()


def check_by_mpi(comm: Communicator) -> None:
    """MPI's own allreduce goes by way of a copy."""
    if comm._shared.mpi is None:
        return
    for count, dtype, op in dtypes_and_reductions(1, 40_011):
        arrays = [random_array(rank, count, dtype, op, 7) for rank in range(comm.size)]
        if dtype.kind in "iu":  # nothing overflows: MPI may saturate there
            arrays = [np.fmod(x, dtype.type(2 if op == ringdl.Product else 10)) for x in arrays]
        mine = on_device(arrays[comm.rank])
        if dtype.name in ("float16", "bfloat16", "bool"):
            with expect(ringdl.UsageError, "has no allreduce of"):
                comm.allreduce_(mine, op, algorithm="mpi")
            continue
        assert comm.allreduce_(mine, op, algorithm="mpi") is mine
        reduced(arrays, op).check(mine.numpy(), f"{op.name} of {count} {dtype}")
    x = on_device(np.ones(3))
    with expect(ringdl.UsageError, "blocking only"):
        comm.allreduce_async(x, algorithm="mpi")
    assert (comm.allreduce(x, ringdl.Sum).numpy() == comm.size).all()


@needs(ranks=2)
def check_messages(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(on_device(np.arange(5000.0)), 1)
    elif comm.rank == 1:
        array = on_device(np.zeros(5000))
        comm.recv_(array, 0)
        assert (array.numpy() == np.arange(5000.0)).all()


@needs(ranks=2)
def check_kinds_of_memory_differ(comm: Communicator) -> None:
    """A rank with an array in the CPU's memory is told apart; the next call goes on."""
    values = np.ones(1000, np.float32)
    mine = values.copy() if comm.rank == 1 else on_device(values)
    for name in ("kinds", None):  # an unnamed one of the CPU's may go by slots
        with expect(ringdl.MismatchError, "memory: "):
            comm.allreduce_(mine, ringdl.Sum, name=name)
        assert (comm.allreduce(on_device(values), ringdl.Sum).numpy() == comm.size).all()


@needs(ranks=2)
def check_a_device_that_fails(comm: Communicator) -> None:
    """What it takes part in fails on all ranks; arrays in the CPU's memory go on."""
    break_device = pretended("break")
    if break_device is None:
        return
    array = on_device(np.ones(1_500_000, np.float32))
    buckets = ringdl.Buckets([("a", (3,), "float32")], communicator=comm, device=0)
    if comm.rank == 1:
        work = comm.allreduce_async_(array, ringdl.Sum, name="in the middle")
        break_device(719)
        comm.barrier()
    else:
        comm.barrier()
        work = comm.allreduce_async_(array, ringdl.Sum, name="in the middle")
    with expect(ringdl.Error, "failed on rank 1: cu"):
        work.wait()
    with expect(ringdl.Error, "unspecified launch failure"):
        comm.allreduce_(array, ringdl.Sum, name="after it")
    with expect(ringdl.Error, "unspecified launch failure"):
        buckets.ready(0)
        buckets.wait()
    with expect(ringdl.MismatchError, "these buckets cannot be used any more"):
        buckets.ready(0)
    assert comm.allreduce(np.ones(5), ringdl.Sum).tolist() == [comm.size] * 5
    break_device(0)


def check_compression_and_own_reductions(comm: Communicator) -> None:
    values = np.arange(1000, dtype=np.float32)
    result = comm.allreduce(on_device(values), ringdl.Sum, compression="bfloat16").numpy()
    wide = values.astype(ml_dtypes.bfloat16).astype(np.float32) * comm.size
    assert np.allclose(result, wide, rtol=0.02)
    result = comm.allreduce(on_device(values + 1), ringdl.Adasum).numpy()
    assert np.allclose(result, values + 1, rtol=1e-5), "of equal gradients"


def check_custom_op(comm: Communicator) -> None:
    """Reduced on the devices where all have it compiled, which a pretended one only pretends."""
    launches = pretended("launches")
    if launches is None:  # tests/ranks/_on_cuda.py has a real one
        return
    launches.restype = ctypes.c_uint64

    def pretend(function: object, dtype: object, device: int, on_cpu: int) -> None:
        if lacking == comm.rank:
            raise ringdl.Error("Numba is elsewhere")
        _engine.cuda_use_custom(device, on_cpu, b"custom %d\0" % on_cpu, "op")

    for name, lacking in (("float32", -1), ("int64", -1), ("bool", -1), ("float32", 0)):
        arrays = [
            random_array(rank, 5003, np.dtype(name), ringdl.Sum, 7) for rank in range(comm.size)
        ]
        op = ringdl.custom_op(lambda a, b: a if a >= b else b, f"larger {lacking}")
        before = launches()
        with (
            mock.patch("ringdl._custom_op_cuda.load", pretend),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            mine = comm.allreduce(on_device(arrays[comm.rank]), op)
            again = comm.allreduce(mine, op)
        expected = np.maximum.reduce(arrays)
        assert bits(mine.numpy()) == bits(again.numpy()) == bits(expected), (name, lacking)
        there = comm.size > 1 and reach_one_another(comm) and lacking < 0
        assert (sum(comm.allgather_object(launches() - before)) > 0) == there, (name, lacking)
        texts = [str(each.message) for each in said]
        if lacking == comm.rank:
            (text,) = texts
            assert "by way of the CPU's memory: Numba is elsewhere" in text
        else:
            assert not texts


def check_wrong_use(comm: Communicator) -> None:
    for wrong in (99, "cuda:99"):
        with expect(ringdl.UsageError, "there is no CUDA device 99"):
            comm.empty(3, device=wrong)
    assert comm.empty(3, device="cuda").device == comm.local_device
    for dtype in ("complex64", "uint16"):
        with expect(ringdl.UsageError, f"dtype {dtype} are not supported"):
            comm.allreduce_(_cuda.Array((3,), np.dtype(dtype), 0), name=f"wrong {dtype}")
    strided = on_device(np.ones((4, 6), np.float32))
    with expect(ringdl.UsageError, "not contiguous"):
        comm.allreduce_(Strided(strided), name="strided")
    assert (comm.allreduce(strided, ringdl.Sum).numpy() == comm.size).all()


def check_streams_that_are_captured(comm: Communicator) -> None:
    """Refused on all ranks; the next call goes on."""
    make_stream = pretended("stream")
    if make_stream is None:
        return
    make_stream.restype = ctypes.c_size_t
    array = on_device(np.ones(100, np.float32))
    captured = make_stream(comm.rank == 0)
    with expect(ringdl.Error, "is being captured into a CUDA graph"):
        comm.allreduce_(InStream(array, captured), ringdl.Sum, name="captured")
    comm.allreduce_(InStream(array, make_stream(False)), ringdl.Sum, name="captured")
    assert (array.numpy() == comm.size).all()
    buckets = ringdl.Buckets([("a", (3,), "float32")], communicator=comm, device=0)
    if comm.rank == 0:
        with expect(ringdl.UsageError, "is being captured into a CUDA graph"):
            buckets.ready(0, captured)
    buckets.view(0).set(np.ones(3, np.float32))
    buckets.ready(0)
    assert buckets.wait() == [True]


class InStream:
    """An array that is written in a stream."""

    def __init__(self, of: _cuda.Array, stream: int) -> None:
        self.of, self.dtype, self.stream = of, of.dtype, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.of.__cuda_array_interface__ | {"stream": self.stream}


class Strided:
    """Every other column."""

    def __init__(self, of: _cuda.Array) -> None:
        self.of, self.dtype = of, of.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.of.__cuda_array_interface__ | {"shape": (4, 3), "strides": (24, 8)}

"""Which NumPy arrays are taken, and in place means in place."""

from __future__ import annotations

import tempfile

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.support import expect

TYPES = (np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_)


def check_without_axes(comm: Communicator) -> None:
    for dtype in TYPES:
        mine = np.array(1, dtype)
        assert comm.allreduce_(mine, ringdl.Max) is mine
        assert mine.shape == ()
        assert mine == 1
        mine[...] = comm.rank == comm.size - 1
        assert comm.broadcast_(mine, comm.size - 1) is mine
        assert mine == 1
    result = comm.allreduce(np.array(float(comm.rank)), ringdl.Sum)
    assert result.shape == ()
    assert result == comm.size * (comm.size - 1) / 2
    assert comm.allreduce(np.float32(comm.rank), ringdl.Max) == comm.size - 1


def check_not_contiguous_in_place(comm: Communicator) -> None:
    """The result is written back, and nothing beside it is touched."""
    for dtype in TYPES:
        base = np.full((9, 10, 4), 1, dtype)
        views = {
            "step": base[::2, 1::3],
            "backwards": base[::-1, :, ::-1],
            "transposed": base.transpose(2, 0, 1),
            "column": base[:, 4:5, 1],
        }
        for name, view in views.items():
            base[...] = 1
            view[...] = comm.rank == 0
            untouched = np.ones(base.shape, bool)
            marked = untouched.reshape(base.shape)
            offset = np.zeros(base.shape, np.int64)
            offset.flat = np.arange(offset.size)
            here = {
                "step": offset[::2, 1::3],
                "backwards": offset[::-1, :, ::-1],
                "transposed": offset.transpose(2, 0, 1),
                "column": offset[:, 4:5, 1],
            }[name]
            marked.flat[here.ravel()] = False
            assert comm.allreduce_(view, ringdl.Min, name=name) is view
            assert (view == (1 if comm.size == 1 else 0)).all(), (name, dtype)
            assert (base[untouched] == 1).all(), f"{name} {dtype}: wrote beside the view"
            view[...] = comm.rank == comm.size - 1
            assert comm.broadcast_(view, comm.size - 1) is view
            assert (view == 1).all(), (name, dtype)
            assert (base == 1).all()
    order = np.asfortranarray(np.arange(12.0).reshape(3, 4) * (comm.rank + 1))
    address = order.ctypes.data
    comm.allreduce_(order, ringdl.Sum)
    assert np.array_equal(order, np.arange(12.0).reshape(3, 4) * sum(range(1, comm.size + 1)))
    assert order.ctypes.data == address


def check_copies_of_views(comm: Communicator) -> None:
    base = np.arange(40.0).reshape(5, 8) + comm.rank
    mean = np.arange(40.0).reshape(5, 8) + (comm.size - 1) / 2
    assert np.array_equal(comm.allreduce(base[::2, ::-3]), mean[::2, ::-3])
    assert np.array_equal(comm.allreduce(base.T), mean.T)
    base.flags.writeable = False
    assert np.array_equal(comm.allreduce(base), mean), "a copy may be made of a read-only array"
    assert np.array_equal(base, np.arange(40.0).reshape(5, 8) + comm.rank)
    last = comm.broadcast(base[:, 3], comm.size - 1)
    assert np.array_equal(last, np.arange(40.0).reshape(5, 8)[:, 3] + comm.size - 1)


def check_subclasses(comm: Communicator) -> None:
    """They are reduced by their elements, and may be of another class on each rank."""
    size = comm.size
    total = size * (size + 1) / 2
    masked = np.ma.array([1.0, 2.0], mask=[False, True]) * (comm.rank + 1)
    group = [np.full((1, 2), comm.rank + 1.0), np.full(3, comm.rank + 1.0), masked]
    if comm.rank == 0:
        with tempfile.TemporaryFile() as file:
            mapped = np.memmap(file, float, "w+", shape=3)
            mapped[:] = group[1]
            group[:2] = [group[0].view(np.matrix), mapped]
            comm.grouped_allreduce_(group, ringdl.Sum)
    else:
        comm.grouped_allreduce_(group, ringdl.Sum)
    for each in group[:2]:
        assert (np.asarray(each) == total).all()
    assert masked.mask.tolist() == [False, True]
    assert masked.data[0] == total


def check_refused(comm: Communicator) -> None:
    """UsageErrors, before any message: the ranks stay in step."""
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with expect(ringdl.UsageError, "read-only"):
        comm.allreduce_(read_only)
    with expect(ringdl.UsageError, "read-only"):
        comm.broadcast_(read_only)
    with expect(ValueError, "read-only"):
        comm.allreduce_async_(read_only)
    swapped = np.zeros(3, np.dtype(np.float32).newbyteorder())
    other = {
        "foreign byte order": swapped,
        "complex64": np.zeros(3, np.complex64),
        "uint32": np.zeros(3, np.uint32),
        "datetime64": np.zeros(3, "datetime64[s]"),
        "object": np.zeros(3, object),
        "list": [1.0, 2.0],
        "str": "text",
        "NoneType": None,
    }
    calls = (
        comm.allreduce,
        comm.allreduce_,
        comm.allreduce_async,
        comm.allreduce_async_,
        comm.broadcast,
        comm.broadcast_,
        comm.allgather,
    )
    for text, x in other.items():
        for call in calls:
            try:
                with expect(ringdl.UsageError, text):
                    call(x)
            except Exception as error:
                error.add_note(f"{call.__name__} of {text}")
                raise
    with expect(ringdl.UsageError, "timeout"):
        comm.allreduce_async(np.zeros(3), name="later").wait(timeout=-1)
    comm.barrier()
    assert comm.allreduce(np.array([2.0])).tolist() == [2.0]


def check_what_looks_like_another_dtype(comm: Communicator) -> None:
    """The short way of unnamed calls takes arrays by their dtype's number, not its letter."""
    for dtype in (ml_dtypes.int4, ml_dtypes.float8_e4m3, np.longdouble, np.complex64, ">f4"):
        x = np.ones(4, dtype)
        with expect(ringdl.UsageError, ""):
            comm.allreduce_(x)
    for op in (1, True, "sum", None):
        with expect(ringdl.UsageError, "take ringdl.Average"):
            comm.allreduce_(np.ones(4), op)
    total = comm.allreduce_(np.ones((), np.float32), ringdl.Sum)
    assert total.shape == ()
    assert total == comm.size

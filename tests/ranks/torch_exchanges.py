"""Torch tensors in the CPU's memory, as the other collectives take and return them."""

from __future__ import annotations

import torch

import ringdl
from ringdl import Communicator
from tests.ranks.support import assert_same_bits, expect, needs
from tests.ranks.torch_arrays import FLOATS, INTEGERS

DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def tensor(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(rows * 3) + rank) % 5).to(dtype).reshape(rows, 3)


def check_every_dtype(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for dtype in DTYPES:
        for rows in (0, 1, 400):
            mine = tensor(rank, rows * size, dtype)
            parts = [tensor(r, rows * size, dtype)[rows * rank :][:rows] for r in range(size)]
            everybody = torch.cat([tensor(r, rows, dtype) for r in range(size)])
            for result, expected in (
                (comm.alltoall(mine), torch.cat(parts)),
                (comm.alltoall_async(mine, [rows] * size).wait()[0], torch.cat(parts)),
                (comm.gather(tensor(rank, rows, dtype), size - 1), everybody),
                (comm.scatter(mine, size - 1), tensor(size - 1, rows * size, dtype)[rows * rank :]),
                (comm.reducescatter(mine, ringdl.Max), torch.stack(parts).amax(0)),
                (comm.reducescatter_async(mine, ringdl.Min).wait(), torch.stack(parts).amin(0)),
            ):
                if result is None:
                    assert rank != size - 1
                    continue
                assert isinstance(result, torch.Tensor)
                assert result.dtype == dtype
                assert torch.equal(result, expected[: len(result)]), (dtype, rows)
                assert len(result) in (rows, rows * size)
                result.zero_()  # it belongs to the caller
            assert torch.equal(mine, tensor(rank, rows * size, dtype)), "the argument was changed"


def check_shapes(comm: Communicator) -> None:
    """Views, gradients, scalars, and rows of no bytes."""
    rank, size = comm.rank, comm.size
    wide = torch.arange(24.0 * size).reshape(4, 6 * size) + rank
    mean = torch.arange(24.0 * size).reshape(4, 6 * size) + (size - 1) / 2
    assert torch.equal(comm.reducescatter(wide.t()), mean.t()[6 * rank :][:6])
    parameter = torch.nn.Parameter(torch.full((size, 2), float(rank)))
    came = comm.alltoall(parameter)
    assert not came.requires_grad
    assert came[:, 0].tolist() == list(range(size))
    gathered = comm.gather(torch.tensor(rank))
    assert rank > 0 or gathered.tolist() == list(range(size))
    assert comm.alltoall(torch.ones(2 * size, 0)).shape == (2 * size, 0)
    assert comm.scatter(torch.ones(size, 0, 5)).shape == (1, 0, 5)
    for call in (comm.alltoall, comm.scatter, comm.reducescatter):
        with expect(ringdl.UsageError, "without axes has none"):
            call(torch.tensor(1.0))


@needs(ranks=2)
def check_messages(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for dtype in DTYPES:
        base = torch.zeros(6, 4).to(dtype)
        work = comm.send_async(tensor(rank, 2, dtype), (rank + 1) % size, "m")
        assert comm.recv_(view := base.t()[:2, ::2], (rank - 1) % size, "m") is view
        work.wait()
        assert torch.equal(view, tensor((rank - 1) % size, 2, dtype))
        assert not base.t()[:2, 1::2].any(), "wrote beside the view"


def check_grouped(comm: Communicator) -> None:
    """Tensors and arrays of several dtypes as one; a parameter in place."""
    rank, size = comm.rank, comm.size
    total = size * (size - 1) // 2
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    xs = [
        parameter,
        torch.full((2, 70_000), float(rank)),
        torch.full((5,), rank, dtype=torch.int16),
        torch.full((4, 6), float(rank))[:, ::2],
        torch.full((5,), rank).cpu().numpy(),
        torch.full((2,), float(rank), dtype=torch.bfloat16),
        torch.full((1,), float(rank), dtype=torch.bfloat16),
    ]
    copies = comm.grouped_allreduce(xs, ringdl.Sum)
    for x, copy in zip(xs, copies, strict=True):
        assert type(copy) is (torch.Tensor if isinstance(x, torch.nn.Parameter) else type(x))
        assert x.dtype == copy.dtype
        assert (x == rank).all(), "the argument was changed"
        assert (copy == total).all()
    results = comm.grouped_allreduce_(xs, ringdl.Sum, "in place")
    assert all(x is result for x, result in zip(xs, results, strict=True))
    assert all((x == total).all() for x in xs)
    assert_same_bits(comm, parameter.detach().cpu().numpy())
    for algorithm in ("ring", "doubling"):
        result = comm.allreduce(torch.full((9,), rank), ringdl.Sum, algorithm=algorithm)
        assert result.tolist() == [total] * 9


@needs(processes=True, mpi=True)
def check_by_mpi(comm: Communicator) -> None:
    x = torch.full((4, 6), float(comm.rank))[:, ::2]
    assert comm.allreduce_(x, algorithm="mpi") is x
    assert (x == (comm.size - 1) / 2).all()
    with expect(ringdl.UsageError, "MPI has no allreduce of"):
        comm.allreduce(torch.ones(3, dtype=torch.bfloat16), algorithm="mpi")
    comm.barrier()


def check_negative_bits(comm: Communicator) -> None:
    """Torch negates such views when they are read."""
    view = torch.tensor([1 + 5j]).conj().imag
    assert view.is_neg()
    assert comm.allgather(view).tolist() == [-5.0] * comm.size
    assert comm.allreduce_(view, ringdl.Max) is view
    assert view.item() == -5.0

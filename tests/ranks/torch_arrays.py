"""Torch tensors in the CPU's memory, as ringdl itself takes them."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

import ringdl
from ringdl import Communicator
from ringdl._cores import count_physical
from tests.ranks.support import assert_same_bits, expect, needs, segments

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors_of_every_dtype(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for dtype in FLOATS + INTEGERS:
        for count in (0, 1, 5, 5003):
            mine = (torch.arange(count) % 3 + rank).to(dtype)
            total = (torch.arange(count) % 3 * size + size * (size - 1) // 2).to(dtype)
            with segments(comm, 4096):
                result = comm.allreduce(mine, ringdl.Sum)
            assert result.dtype == dtype
            assert torch.equal(result, total), (dtype, count)
            assert torch.equal(
                comm.allreduce(mine, ringdl.Max), (torch.arange(count) % 3 + size - 1).to(dtype)
            )
            assert torch.equal(mine, (torch.arange(count) % 3 + rank).to(dtype))
            assert comm.broadcast_(mine, size - 1) is mine
            assert torch.equal(mine, (torch.arange(count) % 3 + size - 1).to(dtype))
        gathered = comm.allgather(torch.full((rank, 2), rank, dtype=dtype))
        assert gathered.dtype == dtype
        assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r)]
    truth = torch.tensor([rank == 0, rank == size - 1, True, False])
    assert comm.allreduce(truth, ringdl.Sum).tolist() == [True, True, True, False]
    assert comm.allreduce(truth).tolist() == [size == 1, size == 1, True, False]
    assert comm.allgather(truth[:1]).tolist() == [r == 0 for r in range(size)]


def check_tensors_in_place(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        base = torch.full((6, 8), 1, dtype=dtype)
        view = base[::2, 1::3]
        view.fill_(rank)
        address = base.data_ptr()
        assert comm.allreduce_(view, ringdl.Sum) is view
        assert (view == size * (size - 1) // 2).all()
        view.fill_(1)
        assert (base == 1).all(), "wrote beside the view"
        base.fill_(rank)
        assert comm.allreduce_(base.t(), ringdl.Max).shape == (8, 6)
        assert (base == size - 1).all()
        assert base.data_ptr() == address
        work = comm.allreduce_async_(base, ringdl.Max)
        assert work.wait() is base
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    expected = comm.broadcast(images, 0)
    comm.broadcast_(images, 0)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, expected)
    assert_same_bits(comm, images.cpu().numpy())
    scalar = torch.tensor(float(rank))
    comm.allreduce_(scalar, ringdl.Sum)
    assert scalar.item() == size * (size - 1) / 2
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert comm.allreduce_(parameter, ringdl.Max) is parameter
    assert parameter.tolist() == [size - 1.0] * 3
    assert not comm.allreduce(parameter).requires_grad


def check_tensors_refused(comm: Communicator) -> None:
    for call in (comm.allreduce, comm.allreduce_, comm.broadcast_, comm.allgather):
        for tensor in (torch.zeros(2, dtype=torch.complex64), torch.zeros(3, dtype=torch.uint16)):
            with expect(ringdl.UsageError, "not supported"):
                call(tensor)
        with expect(ringdl.UsageError, "sparse"):
            call(torch.eye(3).to_sparse())
        with expect(ringdl.UsageError, "meta"):
            call(torch.zeros(3, device="meta"))
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        for name in (None, "freed"):
            with expect(ringdl.UsageError, "its storage was freed"):
                call(freed, name=name)
    comm.barrier()


@needs(ranks=2)
def check_small_tensors_need_no_message(comm: Communicator) -> None:
    """As NumPy's arrays: they meet in slots. A rank that waits long for the others sends a header.

    How often that is depends on how many ranks have a core. One call in 10 may answer a late rank.
    """
    if len(set(comm.memory_hosts())) > 1:
        return
    tensor = torch.nn.Parameter(torch.ones(100))
    if tensor.is_cuda:  # those do not
        return
    cpus = set[int]().union(*comm.allgather_object(os.sched_getaffinity(0)))
    # A rank waits 20 us before it sends one; if it shares its core, 200 us.
    quick_seconds = 20e-6 if count_physical(cpus) >= comm.size else 100e-6
    ringdl.barrier()
    quick: list[float] = []
    before = at_first = comm.stats()
    for _ in range(200):
        begin = time.perf_counter()
        assert comm.allreduce_(tensor, ringdl.Average) is tensor
        took = time.perf_counter() - begin
        after = comm.stats()
        if took < quick_seconds:
            quick.append(after["messages_sent"] - before["messages_sent"])
        before = after
    assert before["data_messages_sent"] == at_first["data_messages_sent"]
    quick_calls = comm.allreduce(np.array([len(quick)]), ringdl.Sum)
    assert quick_calls[0] >= 10 * comm.size, "of 200 on each rank"
    assert 10 * sum(quick) <= len(quick), f"{sum(quick)} messages in {len(quick)} quick calls"
    assert (tensor == 1).all()

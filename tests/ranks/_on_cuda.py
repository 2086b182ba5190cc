"""What needs a real CUDA device: other libraries' arrays, torch's own wrappers, and many works.

bench/cuda_check.py runs it, with RINGDL_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import gc
import math
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringdl
import ringdl.torch.backend
from ringdl import Communicator
from tests.ranks.support import expect
from tests.ranks.torch_helpers import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    take_step,
    whole_batch,
)

WORKS = 100_000


def _start() -> None:
    if not dist.is_initialized():
        ringdl.torch.backend._set_environment()
        dist.init_process_group("ringdl")


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        inputs, targets = whole_batch(step)
        optimizer.zero_grad()
        loss_of(model, part(inputs), part(targets)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _trained_alone() -> torch.nn.Module:
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        take_step(model, optimizer, *whole_batch(step))
    return model


def check_ddp() -> None:
    """DistributedDataParallel over the backend is training with whole batches."""
    _start()
    model = make_mlp()
    _train(DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01))
    assert next(model.parameters()).is_cuda
    assert_close(model, _trained_alone())
    assert_same_bits(model.parameters())


def check_fully_shard(comm: Communicator) -> None:
    _start()
    model = make_mlp()
    fully_shard(model, mesh=init_device_mesh("cuda", (comm.size,)))
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for own, expected in zip(model.parameters(), _trained_alone().parameters(), strict=True):
        whole = own.detach().full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(whole, expected.detach(), rtol=1e-10, atol=1e-12)


def check_numba(comm: Communicator) -> None:
    """Numba's arrays, in place and not."""
    from numba import cuda

    values = np.arange(3000.0) + comm.rank
    total = comm.size * (np.arange(3000.0) + (comm.size - 1) / 2)
    array = cuda.to_device(values)
    assert (comm.allreduce(array, ringdl.Sum).numpy() == total).all()
    assert (array.copy_to_host() == values).all()
    assert comm.allreduce_(array, ringdl.Sum) is array
    assert (array.copy_to_host() == total).all()


def check_custom_op(comm: Communicator) -> None:
    """A reduction of the user's own, which Numba compiles for the device."""
    from numba import cuda

    for dtype in (np.float64, np.float32, np.int64, np.int32, np.int16, np.uint8, np.bool_):
        op = ringdl.custom_op(lambda a, b: a if a >= b else b, "larger")
        values = [(np.arange(3000) * (rank + 7) % 101).astype(dtype) for rank in range(comm.size)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # it does not go by way of the CPU
            result = comm.allreduce(cuda.to_device(values[comm.rank]), op).numpy()
        assert (result == np.maximum.reduce(values)).all(), dtype
    scale = 3.0
    op = ringdl.custom_op(lambda a, b: math.sqrt(a * a + b * b) / scale * scale, "length")
    values = np.linspace(1, 2, 70_001, dtype=np.float32)
    array = cuda.to_device(values)
    comm.allreduce_(array, op)
    wanted = values * np.sqrt(np.float32(comm.size))
    np.testing.assert_allclose(array.copy_to_host(), wanted, rtol=1e-5)


def check_tensors_of_every_kind(comm: Communicator) -> None:
    """64-bit integers, complex numbers, empty and strided ones, on other streams."""
    total = comm.size * (comm.size + 1) // 2
    long = torch.full((1000,), (comm.rank + 1) << 40)
    assert (ringdl.allreduce(long, ringdl.Sum) == total << 40).all()
    _start()
    complex_ones = torch.full((10,), complex(comm.rank + 1, 1))
    dist.all_reduce(complex_ones)
    assert (complex_ones == complex(total, comm.size)).all()
    assert ringdl.allreduce(torch.empty(0)).numel() == 0
    strided = torch.full((40, 30), float(comm.rank + 1)).t()
    assert ringdl.allreduce_(strided, ringdl.Sum) is strided
    assert (strided == total).all()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(20):
            x = torch.randn(4 << 20).mul_(0).add_(comm.rank + turn)
            ringdl.allreduce_(x, ringdl.Average)
            x.mul_(2)
            assert (x == 2 * turn + comm.size - 1).all()


def check_graphs_are_refused() -> None:
    x = torch.ones(100)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with expect(ringdl.UsageError, "graph"), torch.cuda.graph(graph):
        ringdl.allreduce_(x)
    assert (ringdl.allreduce(x, ringdl.Sum) == ringdl.size()).all()


def check_nothing_grows(comm: Communicator) -> None:
    """Memory of the device, files and threads, after many small works, 100 of them at once."""
    xs = [torch.ones(256) for _ in range(100)]

    def held() -> tuple[int, int, int]:
        gc.collect()
        torch.cuda.synchronize()
        tasks, files = (len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd"))
        return torch.cuda.mem_get_info()[0], tasks, files

    def use(times: int) -> None:
        for _ in range(times // len(xs)):
            for work in [comm.allreduce_async_(x) for x in xs]:
                work.wait()
        comm.barrier()

    use(1000)
    before = held()
    use(WORKS)
    after = held()
    assert before[0] - after[0] < 4 << 20, "of the device, by all ranks"
    assert after[1:] == before[1:], (before, after)

"""Collectives on tensors under the names that training scripts use."""

from __future__ import annotations

from collections.abc import Callable

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import expect
from tests.ranks.torch_helpers import assert_same_bits


def check_allreduce() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
    ):
        values = torch.full((3, 2), rank + 1, dtype=dtype)
        total = size * (size + 1) // 2
        assert torch.equal(hvd.allreduce(values, op=hvd.Sum), torch.full_like(values, total)), dtype
        assert torch.equal(hvd.allreduce(values, average=False), torch.full_like(values, total)), (
            dtype
        )
        assert torch.equal(hvd.allreduce(values, op=hvd.Max), torch.full_like(values, size)), dtype
        assert torch.equal(hvd.allreduce(values, op=hvd.Min), torch.full_like(values, 1)), dtype
        assert (values == rank + 1).all()
    assert hvd.allreduce(torch.tensor(float(rank)), name="loss").item() == (size - 1) / 2


def check_allreduce_in_place() -> None:
    rank, size = hvd.rank(), hvd.size()
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert torch.equal(parameter.detach(), torch.full((4,), size * (size - 1) / 2))
    whole = torch.full((4, 6), float(rank))
    hvd.allreduce_(whole[:, ::2])
    assert torch.equal(whole[:, ::2], torch.full((4, 3), (size - 1) / 2))
    assert torch.equal(whole[:, 1::2], torch.full((4, 3), float(rank)))


def check_allreduce_async() -> None:
    rank, size = hvd.rank(), hvd.size()
    values = torch.full((5,), float(rank))
    works = [
        hvd.allreduce_async(values * index, name=f"v{index}", op=hvd.Sum) for index in range(4)
    ]
    for index, work in enumerate(works):
        assert torch.equal(hvd.synchronize(work), torch.full((5,), index * size * (size - 1) / 2))
        assert hvd.poll(work)
    work = hvd.allreduce_async_(values)
    hvd.synchronize(work)
    assert torch.equal(values, torch.full((5,), (size - 1) / 2))
    transposed = torch.arange(6.0).reshape(2, 3).t()
    hvd.synchronize(hvd.allreduce_async_(transposed, average=False))
    assert torch.equal(transposed, torch.arange(6.0).reshape(2, 3).t() * size)
    with expect(ringdl.UsageError, "not both"):
        hvd.allreduce(values, True, op=hvd.Sum)


def check_allgather_and_broadcast() -> None:
    rank, size = hvd.rank(), hvd.size()
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank, dtype=torch.int64))
    assert gathered[:, 1].tolist() == [other for other in range(size) for _ in range(other + 1)]
    root = size - 1
    values = torch.full((3, 2), float(rank)).t()
    assert torch.equal(hvd.broadcast(values, root_rank=root), torch.full((2, 3), float(root)))
    assert values[0, 0] == rank
    hvd.broadcast_(values, root, name="values")
    assert values[0, 0] == root
    assert_same_bits([values])
    assert hvd.broadcast_object({"epoch": rank}, root_rank=root) == {"epoch": root}


def check_second_derivatives() -> None:
    """By the gradients that collectives have: of g(x) = d/dx sum f(x)^3 that of sum g^2."""
    size = hvd.size()
    values = torch.arange(1.0, 2 * size + 1, dtype=torch.float64)

    def twice(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = values.clone().requires_grad_()
        (g,) = torch.autograd.grad((f(x) ** 3).sum(), x, create_graph=True)
        (g**2).sum().backward()
        assert x.grad is not None
        return x.grad / (36 * values**3)

    ones, only_root = torch.ones_like(values), float(hvd.rank() == 0)
    torch.testing.assert_close(twice(hvd.allreduce), ones)
    torch.testing.assert_close(twice(lambda x: hvd.grouped_allreduce([x], name="a")[0]), ones)
    torch.testing.assert_close(twice(hvd.reducescatter), ones)
    torch.testing.assert_close(
        twice(lambda x: hvd.reducescatter(x, op=hvd.Sum, name="b")), ones * size**6
    )
    torch.testing.assert_close(twice(hvd.alltoall), ones)
    torch.testing.assert_close(twice(hvd.allgather), ones / size)
    torch.testing.assert_close(twice(lambda x: hvd.broadcast(x, 0)), ones * only_root / size)

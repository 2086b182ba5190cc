"""torch.distributed over ringdl, against the same over Gloo."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ringdl
import ringdl.torch.backend
from ringdl import Communicator
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import (
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    take_step,
    whole_batch,
)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def start(comm: Communicator) -> Any:
    """The default group, made once per default communicator, and one over Gloo."""
    if dist.is_initialized() and _made_for[-1] is not comm:
        dist.destroy_process_group()
    if not dist.is_initialized():
        ringdl.torch.backend._set_environment()
        dist.init_process_group("ringdl")
        _made_for.append(comm)
        _gloo.append(dist.new_group(backend="gloo"))
    assert dist.get_backend() == "ringdl"
    return _gloo[-1]


_made_for: list[Communicator] = []
_gloo: list[Any] = []


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, of which sums and products are exact in each dtype."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 3, shape, generator=generator)
    return whole.bool() if dtype == torch.bool else whole.to(dtype)


def both(gloo: Any, call: Callable[[Any], list[torch.Tensor]]) -> None:
    """The same from ringdl and from Gloo."""
    for own, expected in zip(call(None), call(gloo), strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected)


def check_reductions(comm: Communicator) -> None:
    gloo = start(comm)
    ops = dist.ReduceOp
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 5), (40_000,)):
            for op in (ops.SUM, ops.MIN, ops.MAX, ops.PRODUCT):
                if dtype == torch.bool or (dtype.is_complex and op != ops.SUM):
                    continue

                def reduce(group: Any, shape=shape, dtype=dtype, op=op) -> list[torch.Tensor]:
                    x = filled(shape, dtype, comm.rank)
                    dist.all_reduce(x, op, group)
                    y = filled(shape, dtype, comm.rank + 10)
                    root = comm.size - 1
                    dist.reduce(y, root, op, group)
                    return [x, y] if comm.rank == root else [x]

                both(gloo, reduce)
    average = torch.full((7,), comm.rank + 1.0)
    work = dist.all_reduce(average, ops.AVG, async_op=True)
    (same,) = work.get_future().wait()
    assert same is average
    assert work.is_completed()
    assert average.tolist() == [(comm.size + 1) / 2] * 7
    some = [torch.ones(3), torch.ones(2, 2), torch.ones(100_000)]
    dist.all_reduce_coalesced(some)
    assert all((tensor == comm.size).all() for tensor in some)
    turned = torch.ones(4, 6).t()
    dist.all_reduce(turned)
    assert (turned == comm.size).all()


def check_exchanges(comm: Communicator) -> None:
    gloo = start(comm)
    rank, size = comm.rank, comm.size
    for dtype in DTYPES:
        for shape in ((1,), (3, 5), (2, 20_000)):
            make = functools.partial(filled, shape, dtype)

            def exchange(group: Any, make=make, dtype=dtype) -> list[torch.Tensor]:
                results = []
                x = make(rank)
                dist.broadcast(x, size - 1, group)
                results.append(x)
                gathered = [make(99) for _ in range(size)]
                dist.all_gather(gathered, make(rank), group)
                results += gathered
                wide = torch.cat([make(99)] * size)
                dist.all_gather_into_tensor(wide, make(rank), group)
                results.append(wide)
                if group is None or dtype not in (torch.bool, torch.complex64):  # not for Gloo
                    at_root = [make(99) for _ in range(size)] if rank == 0 else None
                    dist.gather(make(rank), at_root, 0, group)
                    for other, tensor in enumerate(at_root or []):
                        assert torch.equal(tensor, make(other))
                dealt = [make(other) for other in range(size)] if rank == size - 1 else None
                mine = make(99)
                dist.scatter(mine, dealt, size - 1, group)
                results.append(mine)
                swapped = torch.cat([make(99)] * size)
                dist.all_to_all_single(
                    swapped, torch.cat([make(rank + other) for other in range(size)]), group=group
                )
                results.append(swapped)
                return results

            both(gloo, exchange)
    lists = [torch.empty(other + 1) for other in range(size)]
    dist.all_to_all(lists, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    assert [part.tolist() for part in lists] == [
        [float(other)] * (other + 1) for other in range(size)
    ]
    output = torch.empty(size * (size + 1) // 2)
    sizes = [other + 1 for other in range(size)]
    dist.all_to_all_single(
        output, torch.full((size * (rank + 1),), float(rank)), sizes, [rank + 1] * size
    )
    assert output.tolist() == [float(other) for other in range(size) for _ in range(other + 1)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    told = [rank, "from"]
    dist.broadcast_object_list(told, size - 1)
    assert told == [size - 1, "from"]
    dist.barrier()


def check_reduce_scatter(comm: Communicator) -> None:
    start(comm)
    rank, size = comm.rank, comm.size
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.complex64):
        for shape in ((1,), (3, 5), (30_000,)):
            parts = [torch.full(shape, other + 1).to(dtype) for other in range(size)]
            output = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter(output, parts)
            assert (output == (rank + 1) * size).all()
            whole = torch.cat(parts)
            output = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter_tensor(output, whole)
            assert (output == (rank + 1) * size).all()
    uneven = [torch.ones(other + 1) for other in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, uneven, dist.ReduceOp.AVG)
    assert output.tolist() == [1.0] * (rank + 1)


@needs(ranks=2)
def check_messages_and_groups(comm: Communicator) -> None:
    start(comm)
    rank, size = comm.rank, comm.size
    x = torch.full((5,), float(rank))
    if rank == 0:
        first = dist.isend(x, 1, tag=3)
        dist.send(torch.arange(40_000), 1)
        first.wait()
    elif rank == 1:
        large = torch.empty(200, 200, dtype=torch.int64)
        dist.recv(large, 0)
        assert large[199, 199] == 39_999
        dist.recv(x, 0, tag=3)
        assert x.tolist() == [0.0] * 5
    ring = [
        dist.P2POp(dist.isend, torch.full((3,), rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, came := torch.empty(3, dtype=torch.int64), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert came.tolist() == [(rank - 1) % size] * 3
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        y = torch.ones(3)
        dist.all_reduce(y, group=group)
        assert y.tolist() == [2.0] * 3
        dist.broadcast(y, size - 1, group=group)
    part_of = dist.group.WORLD.split_group([*range(1, size)])
    assert (part_of is None) == (rank == 0)
    if part_of is not None:
        z = torch.ones(2)
        part_of.allreduce([z]).wait()
        assert z.tolist() == [size - 1] * 2


def check_functional_collectives(comm: Communicator) -> None:
    start(comm)
    rank, size = comm.rank, comm.size
    x = torch.full((size, 3), rank + 1.0)
    group = dist.group.WORLD
    total = size * (size + 1) / 2
    assert (functional.all_reduce(x, "sum", group) == total).all()
    assert (functional.all_reduce(x, "avg", group) == total / size).all()
    gathered = functional.all_gather_tensor(x, 0, group)
    assert gathered.shape == (size * size, 3)
    assert gathered[:, 0].tolist() == [1.0 + other for other in range(size) for _ in range(size)]
    assert (functional.reduce_scatter_tensor(x, "sum", 0, group) == total).all()
    assert (functional.broadcast(x, size - 1, group) == size).all()
    rows = functional.all_to_all_single(x, [1] * size, [1] * size, group)
    assert rows[:, 0].tolist() == [other + 1.0 for other in range(size)]
    both_of = functional.all_reduce_coalesced([x, 2 * x], "sum", group)
    assert [tensor[0, 0].item() for tensor in both_of] == [total, 2 * total]


def check_futures(comm: Communicator) -> None:
    """With errors, and with callbacks that communicate."""
    start(comm)
    size = comm.size
    x = torch.ones(40_000)
    twice = (
        dist.all_reduce(x, async_op=True)
        .get_future()
        .then(lambda ended: dist.all_reduce(ended.value()[0], async_op=True).get_future().wait())
    )
    assert twice.wait()[0][0] == size * size
    shapes = torch.ones(3 + comm.rank)
    work = dist.all_reduce(shapes, async_op=True)
    if size > 1:
        with expect(RuntimeError, "disagree"):
            torch.futures.collect_all([work.get_future()]).wait()
        with expect(ringdl.MismatchError, "disagree"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
    lists = [torch.zeros(9) for _ in range(size)]
    work = dist.all_gather(lists, torch.full((9,), 5.0), async_op=True)
    while not work.is_completed():
        pass
    assert all((tensor == 5).all() for tensor in lists)
    assert work.is_success()


def check_what_libraries_ask(comm: Communicator) -> None:
    start(comm)
    world = dist.group.WORLD
    assert [device.type for device in world._device_types] == ["cpu", "cuda"]
    for device in ("cpu", "cuda:0"):
        assert world._get_backend(torch.device(device)) is world
    with expect(ringdl.UsageError, "for tensors on the CPU"):
        world._get_backend(torch.device("meta"))
    x = torch.ones(5)
    world.allreduce(x).wait()  # tensors and options in the forms that C++'s bindings take
    world.allreduce([x], dist.ReduceOp.MAX).wait()
    assert x.tolist() == [comm.size] * 5
    world.broadcast(x, 0).wait()
    y = torch.arange(6.0).reshape(2, 3) * 1j
    world.allreduce([y.conj()]).wait()
    assert torch.equal(y, torch.arange(6.0).reshape(2, 3) * 1j * comm.size)
    dist.broadcast(y[:, 1].imag, 0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        take_step(model, optimizer, *map(part, whole_batch(step)))


def assert_equal_parameters(own: nn.Module, other: nn.Module) -> None:
    for mine, expected in zip(own.parameters(), other.parameters(), strict=True):
        whole = [
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for tensor in (mine.detach(), expected.detach())
        ]
        torch.testing.assert_close(*whole, rtol=1e-12, atol=1e-14)


def check_distributed_data_parallel(comm: Communicator) -> None:
    gloo = start(comm)
    for options in (
        {},
        {"bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        models = []
        for group in (None, gloo):
            torch.manual_seed(comm.rank)  # replicas differ until they are broadcast
            replica = nn.Sequential(nn.BatchNorm1d(6), *make_mlp(comm.rank)).double()
            model = DistributedDataParallel(replica, process_group=group, **options)
            train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            models.append(model)
        assert_equal_parameters(*models)
        assert_same_bits(models[0].parameters())
    model = DistributedDataParallel(make_mlp())
    with model.no_sync():
        loss_of(model, *map(part, whole_batch(0))).backward()
    loss_of(model, *map(part, whole_batch(1))).backward()
    assert_same_bits(parameter.grad for parameter in model.parameters())


def check_buckets_in_shared_memory(comm: Communicator) -> None:
    """DDP's, those of the first step and those of later ones, if the group is ringdl's."""
    gloo = start(comm)
    for group, memory in ((None, comm.empty(1)), (gloo, torch.empty(1).numpy())):
        found: list[str] = []
        model = DistributedDataParallel(make_mlp(), process_group=group)
        model.register_comm_hook((found, group), _averages_and_notes)
        for step in range(3):
            loss_of(model, *map(part, whole_batch(step))).backward()
        is_shared = "memfd:ringdl" in mapping_of(memory.ctypes.data)
        assert is_shared == (group is None and comm.local_size > 1)
        assert ["memfd:ringdl" in name for name in found] == [is_shared] * len(found)
        assert len(found) >= 3


def _averages_and_notes(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    found, group = state
    found.append(mapping_of(bucket.buffer().data_ptr()))
    work = dist.all_reduce(bucket.buffer().div_(ringdl.size()), group=group, async_op=True)
    return work.get_future().then(lambda ended: ended.value()[0])


_averages_and_notes.__annotations__.clear()  # torch refuses those that are strings


def mapping_of(address: int) -> str:
    """The line of what this process has mapped there."""
    with open("/proc/self/maps") as mappings:
        for line in mappings:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= address < end:
                return line
    raise LookupError(hex(address))


def check_uneven_inputs(comm: Communicator) -> None:
    """DDP's join; divided by how many ranks are left, C++ waits for a work that Python dropped."""
    gloo = start(comm)
    for divides_by_all in (True, False):
        models = []
        for group in (None, gloo):
            model = DistributedDataParallel(make_mlp(), process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.join(divide_by_initial_world_size=divides_by_all):
                for step in range(2 + comm.rank):
                    take_step(model, optimizer, *map(part, whole_batch(step)))
            models.append(model)
        assert_equal_parameters(*models)


@needs(ranks=2)
def check_what_ranks_disagree_on(comm: Communicator) -> None:
    start(comm)
    is_last = comm.rank == comm.size - 1
    with expect(ringdl.MismatchError, "dtype"):
        dist.broadcast(torch.zeros(4, dtype=torch.int32 if is_last else torch.float32), 0)
    given = torch.zeros(5 if is_last else 3)
    with expect(ringdl.UsageError, "its own place among the results has 4 of torch.float32"):
        dist.all_gather([torch.empty(4) for _ in range(comm.size)], given)
    comm.barrier()
    sent = torch.zeros(comm.size if is_last else 3 * comm.size)
    output = torch.empty(3 * comm.size - 2)
    counts = [3] * (comm.size - 1) + [1]
    dist.all_to_all_single(output, sent, counts, [len(sent) // comm.size] * comm.size)
    with expect(ringdl.UsageError, "rank 0 has sent 3 elements, for a tensor of 1"):
        dist.all_to_all_single(output, sent, counts[::-1], [len(sent) // comm.size] * comm.size)
    with expect(ringdl.UsageError, "torch.float32 has arrived, for a tensor of torch.int32"):
        dist.all_gather_into_tensor(torch.empty(comm.size, dtype=torch.int32), torch.ones(1))


@needs(ranks=2)
def check_timeouts(comm: Communicator) -> None:
    """Of groups and of barriers, as given there."""
    start(comm)
    brief = dist.new_group(timeout=timedelta(seconds=0.3))
    if comm.rank == 0:
        with expect(ringdl.StallError, "did not end within 0.3 s"):
            dist.barrier(brief)
        with expect(ringdl.StallError, "did not end within 0.2 s"):
            dist.group.WORLD.barrier(timeout=timedelta(seconds=0.2)).wait()
    comm.barrier()
    if comm.rank > 0:
        dist.barrier(brief)
        dist.barrier()
    comm.barrier()


def check_fully_shard(comm: Communicator) -> None:
    gloo = start(comm)
    models = []
    for group in (None, gloo):
        model = make_mlp()
        mesh = (
            init_device_mesh("cpu", (comm.size,))
            if group is None
            else dist.DeviceMesh.from_group(gloo, "cpu")
        )
        for layer in model:
            if [*layer.parameters()]:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        models.append(model)
    assert_equal_parameters(*models)
    reference = make_mlp()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(3):
        take_step(reference, optimizer, *whole_batch(step))
    for own, expected in zip(models[0].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.detach().full_tensor(), expected.detach())

    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    save({"model": models[0].state_dict()}, checkpoint_id=folder)
    again = make_mlp(seed=9)
    fully_shard(again, mesh=init_device_mesh("cpu", (comm.size,)))
    state = {"model": again.state_dict()}
    load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    assert_equal_parameters(again, models[0])


def check_zero_redundancy(comm: Communicator) -> None:
    gloo = start(comm)
    models = []
    for group in (None, gloo):
        model = DistributedDataParallel(make_mlp(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group or dist.group.WORLD, lr=0.01
        )
        train(model, optimizer)
        models.append(model)
    assert_equal_parameters(*models)

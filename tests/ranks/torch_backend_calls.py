"""What torch.distributed's groups are asked in other ways than by its functions; their errors."""

from __future__ import annotations

import functools
import gc
import operator
import time
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringdl
from ringdl import Communicator
from tests.ranks.support import expect, needs
from tests.ranks.torch_backend import _gloo, both, start
from tests.ranks.torch_helpers import assert_same_bits

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def check_bitwise_reductions(comm: Communicator) -> None:
    gloo = start(comm)
    for dtype in INTEGERS:
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):

            def reduce(group: Any, dtype=dtype, op=op) -> list[torch.Tensor]:
                generator = torch.Generator().manual_seed(comm.rank)
                x = torch.randint(0, 127, (3, 50), generator=generator).to(dtype)
                is_for_gloo = group is not gloo or dtype not in (torch.bool, torch.int16)
                wide = x if is_for_gloo else x.to(torch.int32)
                dist.all_reduce(wide, op, group)
                return [wide.to(dtype)]

            both(gloo, reduce)
    part = torch.empty(2, dtype=torch.int32)
    whole = torch.arange(2 * comm.size, dtype=torch.int32)
    dist.reduce_scatter_tensor(part, whole << comm.rank, dist.ReduceOp.BOR)
    expected = [
        functools.reduce(operator.or_, (value << other for other in range(comm.size)))
        for value in (2 * comm.rank, 2 * comm.rank + 1)
    ]
    assert part.tolist() == expected
    with expect(ringdl.UsageError, "bitwise or is for integers and bool, not for float32"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BOR)


def check_premultiplied_sums(comm: Communicator) -> None:
    start(comm)
    for factor in (0.5, torch.tensor([0.5])):
        half = dist._make_nccl_premul_sum(factor)
        x = torch.full((4, 3), comm.rank + 1.0).t()
        dist.all_reduce(x, half)
        total = comm.size * (comm.size + 1) / 4
        assert (x == total).all()
        given, output = torch.full((2 * comm.size,), comm.rank + 1.0), torch.empty(2)
        dist.reduce_scatter_tensor(output, given, half)
        assert (output == total).all()
        assert (given == comm.rank + 1).all(), "an input was changed"
    with expect(ringdl.UsageError, "PREMUL_SUM is for floating-point tensors, not for"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), half)
    with expect(ringdl.UsageError, "no such reduction; take ReduceOp.SUM, AVG"):
        dist.group.WORLD.allreduce(torch.ones(3), dist.ReduceOp.PREMUL_SUM)


def check_sparse_reductions(comm: Communicator) -> None:
    """Rows that several ranks have, that one has, that it has twice; of none at all."""
    start(comm)
    rank, size = comm.rank, comm.size
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        rows = torch.tensor([[0, 1 + rank, 1 + rank]])
        x = torch.sparse_coo_tensor(rows, torch.ones(3, 2, dtype=dtype), (size + 2, 2))
        expected = sum(
            torch.sparse_coo_tensor(
                torch.tensor([[0, 1 + other, 1 + other]]),
                torch.ones(3, 2, dtype=dtype),
                (size + 2, 2),
            ).to_dense()
            for other in range(size)
        )
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.is_sparse
        assert torch.equal(x.to_dense(), expected)
        assert torch.equal(work.result()[0].to_dense(), expected)
        assert_same_bits([x.coalesce().values()])
    empty = torch.sparse_coo_tensor(size=(4, 3))
    (result,) = dist.all_reduce(empty, dist.ReduceOp.AVG, async_op=True).get_future().wait()
    assert result.coalesce().values().numel() == 0
    with expect(ringdl.UsageError, "have sums and averages only", "call to_dense() before"):
        dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    with expect(ringdl.UsageError, "layout torch.sparse_csr are not reduced here"):
        dist.all_reduce(torch.eye(3).to_sparse_csr())


def check_sparse_gradients(comm: Communicator) -> None:
    """DistributedDataParallel of embeddings whose gradients are sparse."""
    gloo = start(comm)
    weights = []
    for group in (None, gloo):
        torch.manual_seed(1)
        model = DistributedDataParallel(
            nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 2)),
            process_group=group,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            indices = torch.tensor([[comm.rank, step], [5, 5 + comm.rank]])
            optimizer.zero_grad()
            model(indices).square().sum().backward()
            optimizer.step()
        weights.append([parameter.detach() for parameter in model.parameters()])
    for own, expected in zip(*weights, strict=True):
        torch.testing.assert_close(own, expected)
    assert_same_bits(weights[0])


def check_complex_parameters(comm: Communicator) -> None:
    gloo = start(comm)
    gradients = []
    for group in (None, gloo):
        torch.manual_seed(2)
        model = DistributedDataParallel(nn.Linear(3, 2, dtype=torch.complex64), process_group=group)
        model(torch.full((2, 3), comm.rank + 1j)).abs().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected)


@needs(ranks=2)
def check_receives_from_any_rank(comm: Communicator) -> None:
    start(comm)
    rank, size = comm.rank, comm.size
    for length in (3, 40_000):
        if rank == 0:
            came = [torch.empty(length) for _ in range(2 * (size - 1))]
            works = [dist.irecv(x, tag=7) for x in came[::2]]
            sources = []
            for work in works:
                work.wait()
                sources.append(work._source_rank())
            sources += [dist.recv(x, tag=7) for x in came[1::2]]
            assert sorted(sources) == sorted([*range(1, size)] * 2)
            seen = dict.fromkeys(range(1, size), 0)
            for x, source in zip(came[::2] + came[1::2], sources, strict=True):
                assert (x == 10 * source + seen[source]).all(), "not in the order of the sender"
                seen[source] += 1
        else:
            for number in range(2):
                dist.send(torch.full((length,), 10.0 * rank + number), 0, tag=7)
        dist.barrier()  # what is sent next has another length
    group = dist.new_group([*range(size)][::-1])
    if rank == 0:
        x = torch.empty(1)
        assert dist.recv(x, group=group) == size - 1
        named = dist.irecv(x, size - 1)
        named.wait()
        assert named._source_rank() == size - 1
        with expect(ringdl.UsageError, "only a receive has a source"):
            dist.barrier(async_op=True)._source_rank()
    else:
        if rank == size - 1:
            dist.send(torch.ones(1), 0, group=group)
            dist.send(torch.ones(1), 0)
        dist.barrier()


def check_all_forms_of_calls(comm: Communicator) -> None:
    """By position and by name, with options and without, tensors and lists of them."""
    start(comm)
    world, rank, size = dist.group.WORLD, comm.rank, comm.size
    op, second, root = dist.ReduceOp.MAX, timedelta(seconds=50), size - 1
    options = dist.AllreduceOptions()
    options.reduceOp = op
    for call in (
        lambda x: world.allreduce(x, op),
        lambda x: world.allreduce([x], op, second),
        lambda x: world.allreduce([x], options),
        lambda x: world.allreduce(tensors=[x], opts=options),
        lambda x: world.allreduce(tensor=x, op=op, timeout=second),
    ):
        call(x := torch.full((3,), float(rank))).wait()
        assert x.tolist() == [root] * 3
    for call in (
        lambda x: world.reduce(x, root, op),
        lambda x: world.reduce(tensor=x, root=root, op=op, timeout=second),
    ):
        call(x := torch.full((3,), -float(rank))).wait()
        assert x.tolist() == [0.0 if rank == root else -rank] * 3
    for call in (
        lambda x: world.broadcast(x, root),
        lambda x: world.broadcast(tensor=x, root=root, timeout=second),
    ):
        call(x := torch.full((3,), float(rank))).wait()
        assert x.tolist() == [root] * 3
    one, wide = torch.full((2,), float(rank)), torch.empty(2 * size)
    lists = [torch.empty(2) for _ in range(size)]
    numbers = [float(other) for other in range(size) for _ in range(2)]
    for call in (
        lambda: world.allgather([lists], [one]),
        lambda: world.allgather(lists, one, second),
        lambda: world.allgather(output_tensors=lists, input_tensor=one),
        lambda: world.gather([lists] if rank == root else [], [one], _gather_to(root)),
        lambda: world.gather(lists if rank == root else [], one, root),
        lambda: world.gather(
            output_tensors=lists if rank == root else [], input_tensor=one, root=root
        ),
    ):
        for tensor in lists:
            tensor.fill_(-1 if rank == root else 0)
        call().wait()
        if rank == root:
            assert torch.cat(lists).tolist() == numbers
    world._allgather_base(output=wide, input=one).wait()
    assert wide.tolist() == numbers
    parts = [torch.full((2,), float(other)) for other in range(size)]
    mine = torch.empty(2)
    for call in (
        lambda: world.scatter([mine], [parts] if rank == root else [], _scatter_from(root)),
        lambda: world.scatter(mine, parts if rank == root else [], root),
        lambda: world.scatter(
            output_tensor=mine, input_tensors=parts if rank == root else [], root=root
        ),
        lambda: world.reduce_scatter([mine], [parts], _maximum()),
        lambda: world.reduce_scatter(mine, parts, op),
        lambda: world.reduce_scatter(output=mine, input=parts, op=op, timeout=second),
    ):
        mine.fill_(-1)
        call().wait()
        assert mine.tolist() == [float(rank)] * 2
    world._reduce_scatter_base(outputTensor=mine, inputTensor=torch.cat(parts)).wait()
    assert mine.tolist() == [float(rank) * size] * 2
    world.alltoall_base(wide, torch.cat(parts), [2] * size, [2] * size, second).wait()
    assert wide.tolist() == [float(rank)] * 2 * size
    world.alltoall_base(
        output=wide, input=torch.cat(parts), output_split_sizes=[], input_split_sizes=[]
    ).wait()
    assert wide.tolist() == [float(rank)] * 2 * size
    world.barrier(timeout=second).wait()
    world.barrier(second).wait()
    if size > 1 and rank == 0:
        world.send(tensors=[one], dstRank=1, tag=2).wait()
    elif rank == 1:
        world.recv(tensors=[mine], srcRank=0, tag=2).wait()
        assert mine.tolist() == [0.0, 0.0]
    for wrong in (
        lambda: world.allreduce(),
        lambda: world.allreduce(one, root=1),
        lambda: world.barrier(second, 3),
    ):
        with expect(TypeError, "() "):
            wrong()


def _gather_to(root: int) -> Any:
    options = dist.GatherOptions()
    options.rootRank = root
    return options


def _scatter_from(root: int) -> Any:
    options = dist.ScatterOptions()
    options.rootRank = root
    return options


def _maximum() -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


@needs(ranks=2)
def check_futures_end_with_their_works(comm: Communicator) -> None:
    """One that was asked for before, and whose message comes late, holds nothing up."""
    start(comm)
    came = torch.zeros(2)
    if comm.rank == 0:
        message = dist.irecv(came, 1)
        late = message.get_future()
        later = late.then(lambda _: came.tolist())
    futures = [dist.all_reduce(torch.ones(n), async_op=True).get_future() for n in (4, 90_000)]
    begin = time.monotonic()
    for future in futures:
        assert future.wait()[0][0] == comm.size
    assert time.monotonic() - begin < 10, "it has waited for another one"
    if comm.rank == 0:
        assert not late.done()
    dist.barrier()
    if comm.rank == 1:
        dist.send(torch.ones(2), 0)
    elif comm.rank == 0:
        assert later.wait() == [1.0, 1.0]
        assert message.is_completed()


@needs(ranks=2)
def check_dropped_works_keep_no_tensors(comm: Communicator) -> None:
    """Once they have ended, and another one has begun."""
    start(comm)
    dropped = []
    for _ in range(10):
        x = torch.ones(1000)
        dropped.append(weakref.ref(x))
        dist.all_reduce(x, async_op=True)
        del x
    for _ in range(20):  # a barrier may end before they do
        dist.barrier()
        gc.collect()
        left = sum(each() is not None for each in dropped)
        if comm.allreduce(np.array([left]), ringdl.Sum)[0] == 0:
            break
        time.sleep(0.1)
    assert left == 0


@needs(ranks=2)
def check_a_future_that_stalls(comm: Communicator) -> None:
    """It fails when its time is over, and the others go on."""
    start(comm)
    if comm.rank == 0:
        brief = dist.group.WORLD.barrier(timeout=timedelta(seconds=0.3))
        failed = brief.get_future()
    good = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    assert good.wait()[0][0] == comm.size
    if comm.rank == 0:
        with expect(RuntimeError, "did not end within 0.3 s", within=10):
            failed.wait()
    comm.barrier()
    if comm.rank > 0:
        dist.barrier()
    elif comm.rank == 0:
        brief.wait()


@needs(ranks=2)
def check_timeouts_of_all_collectives(comm: Communicator) -> None:
    start(comm)
    world, brief = dist.group.WORLD, timedelta(seconds=0.2)
    x, row = torch.ones(2), torch.ones(2 * comm.size)
    options = dist.AllreduceOptions()
    options.timeout = brief
    lists = [torch.empty(2) for _ in range(comm.size)]
    calls = (
        lambda time: world.allreduce([x], **({"opts": options} if time else {})),
        lambda time: world.broadcast(x, 0, **time),
        lambda time: world.allgather(lists, x, **time),
        lambda time: world.reduce_scatter(x, lists, **time),
        lambda time: world.alltoall_base(row, row.clone(), [], [], **time),
        lambda time: world.barrier(**time),
    )
    for call in calls:
        if comm.rank == 0:
            work = call({"timeout": brief})
            with expect(dist.DistError, " timeout ", "did not end within 0.2 s", within=10):
                work.wait()
            with expect(ringdl.StallError, "did not end within 0.2 s", within=10):
                work.wait()
            comm.barrier()
            work.wait(timedelta(seconds=20))
        else:
            comm.barrier()
            call({}).wait()
    short = dist.new_group()
    short.set_timeout(brief)
    if comm.rank == 0:
        with expect(ringdl.StallError, "within 0.2 s"):
            dist.barrier(short)
    comm.barrier()
    if comm.rank > 0:
        dist.barrier(short)
    is_last = comm.rank == comm.size - 1
    with expect(dist.DistError, "disagree"):
        dist.all_reduce(torch.ones(3 if is_last else 2))


def check_events_of_profilers(comm: Communicator) -> None:
    start(comm)
    x, lists = torch.ones(2, 3), [torch.empty(2, 3) for _ in range(comm.size)]
    for profiler in (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ),
        torch.autograd.profiler.profile(record_shapes=True),
    ):
        with profiler as watched:
            work = dist.all_reduce(x, async_op=True)
            dist.all_gather(lists, x)
            work.wait()
            dist.barrier()
        is_torch = isinstance(watched, torch.profiler.profile)
        events = watched.events() if is_torch else watched.function_events
        found = {event.name: event for event in events if event.name.startswith("ringdl:")}
        assert set(found) == {"ringdl:all_reduce", "ringdl:all_gather", "ringdl:barrier"}
        for name in ("ringdl:all_reduce", "ringdl:all_gather"):
            assert found[name].input_shapes == [[2, 3]]
            assert found[name].cpu_time > 0
            assert found[name].is_async or comm.size == 1


def check_numbers_and_stores(comm: Communicator) -> None:
    start(comm)
    group = dist.new_group()
    assert group._get_sequence_number_for_group() == 0
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(group)
    assert group._get_sequence_number_for_group() == 2
    group.get_group_store().set(f"from {comm.rank}", "me")
    dist.barrier(group)
    last = group.get_group_store().get(f"from {comm.size - 1}")
    assert last == b"me"
    assert group.get_group_store() is not dist.group.WORLD.get_group_store()
    with expect(ringdl.UsageError, "start all ranks with one mpirun"):
        group.merge_remote_group(None, 1, timedelta(1))
    group.monitored_barrier(timedelta(seconds=50))


def check_groups_again_and_again(comm: Communicator) -> None:
    """Ranks leave the group, and make the next one, at other times; rank 0 holds the store."""
    start(comm)
    dist.destroy_process_group()
    _gloo.clear()  # they share the store
    for _ in range(4):
        dist.init_process_group("ringdl")
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [comm.size] * 2
        time.sleep(0.2 if comm.rank == 0 else 0)  # the others ask for a store meanwhile
        dist.destroy_process_group()

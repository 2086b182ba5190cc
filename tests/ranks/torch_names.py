"""Each documented name of MPI training scripts, used as such scripts use it.

The functions are scripts for Horovod 0.28.1 in which nothing but the import is changed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

import ringdl.torch as hvd
from tests.ranks.support import expect, needs

DOCUMENTED = """
init shutdown is_initialized size rank local_size local_rank cross_size cross_rank is_homogeneous
mpi_threads_supported mpi_enabled gloo_enabled mpi_built gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async
allgather allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_
broadcast_async broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize Average Sum Min
Max Product Adasum Compression ProcessSet global_process_set add_process_set remove_process_set
broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
DistributedOptimizer SyncBatchNorm start_timeline stop_timeline HorovodInternalError
"""


def check_every_name_is_used() -> None:
    names = DOCUMENTED.split()
    source = Path(__file__).read_text()
    assert not [name for name in names if not hasattr(hvd, name)]
    assert not [name for name in names if f"hvd.{name}" not in source]


def check_the_job() -> None:
    hvd.init()
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert 0 <= hvd.local_rank() < hvd.local_size()
    assert 0 <= hvd.cross_rank() < hvd.cross_size()
    assert hvd.is_homogeneous() in (True, False)
    assert hvd.mpi_threads_supported() in (True, False)
    assert hvd.mpi_built()
    if hvd.size() > 1 and not hvd.gloo_enabled():
        assert hvd.mpi_enabled() in (True, False)
    assert hvd.nccl_built() >= 0
    for is_built in (hvd.gloo_built, hvd.ddl_built, hvd.ccl_built):
        assert not is_built()
    assert hvd.cuda_built()
    assert not hvd.rocm_built()


def check_end_and_begin_again() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.is_initialized()


def check_allreduces() -> None:
    size = hvd.size()
    tensor = torch.ones(4, 3) * (hvd.rank() + 1)
    mean = (size + 1) / 2
    assert torch.allclose(hvd.allreduce(tensor, name="a", op=hvd.Average), torch.tensor(mean))
    assert torch.allclose(hvd.allreduce(tensor, average=False), torch.tensor(mean * size))
    assert (hvd.allreduce(tensor, op=hvd.Min) == 1).all()
    assert (hvd.allreduce(tensor, op=hvd.Max) == size).all()
    product = hvd.allreduce(torch.full((2,), 2.0), op=hvd.Product)
    assert product.tolist() == [2.0**size] * 2
    assert torch.allclose(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3))
    half = hvd.allreduce(tensor, name="c", compression=hvd.Compression.fp16)
    assert torch.allclose(half, torch.tensor(mean))
    in_place = tensor.clone()
    assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
    handle = hvd.allreduce_async(tensor, name="b", op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert torch.equal(hvd.synchronize(handle), in_place)
    handle = hvd.allreduce_async_(tensor, name="d", op=hvd.Sum)
    assert hvd.synchronize(handle) is tensor
    assert torch.equal(tensor, in_place)


def check_grouped_allreduces() -> None:
    size = hvd.size()
    tensors = [torch.ones(2), torch.ones(3, 3)]
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum, name="g"),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
    ):
        assert [result.unique().tolist() for result in results] == [[size], [size]]
    drawn = hvd.grouped_allreduce((tensor for tensor in tensors), op=hvd.Sum)
    assert len(drawn) == len(hvd.grouped_allgather(iter(tensors))) == 2
    hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert tensors[0].tolist() == [size] * 2
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors, average=True))
    assert tensors[1].unique().tolist() == [size]


def check_sparse_allreduce() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float(hvd.rank())], (4,))
    result = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name="s", op=hvd.Sum))
    dense = result.to_dense() if result.is_sparse else result
    assert dense.tolist() == [hvd.size(), 0, sum(range(hvd.size())), 0]


def check_allgathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.full((rank + 1, 2), rank)
    expected = [rank for rank in range(size) for _ in range(rank + 1)]
    assert hvd.allgather(tensor, name="a")[:, 0].tolist() == expected
    handle = hvd.allgather_async(tensor)
    assert hvd.synchronize(handle)[:, 1].tolist() == expected
    first, second = hvd.grouped_allgather([tensor, tensor + 1])
    assert (second - first == 1).all()
    first, _ = hvd.synchronize(hvd.grouped_allgather_async([tensor, tensor]))
    assert first[:, 0].tolist() == expected


def check_one_name_for_several_kinds() -> None:
    """In another order on other ranks."""
    x = torch.ones(2)
    kinds = [
        lambda: hvd.allreduce_async(x, name="w", op=hvd.Sum),
        lambda: hvd.allgather_async(x, name="w"),
        lambda: hvd.broadcast_async(x, 0, name="w"),
    ]
    turn = hvd.rank() % 3
    handles = [begin() for begin in kinds[turn:] + kinds[:turn]]
    results = [hvd.synchronize(handle) for handle in handles]
    summed, gathered, broadcast = results[-turn:] + results[:-turn] if turn else results
    assert summed.tolist() == [hvd.size()] * 2
    assert gathered.tolist() == [1] * 2 * hvd.size()
    assert broadcast.tolist() == [1, 1]


def check_broadcasts() -> None:
    root, tensor = hvd.size() - 1, torch.full((3,), hvd.rank())
    assert hvd.broadcast(tensor, root, name="b").tolist() == [root] * 3
    assert hvd.synchronize(hvd.broadcast_async(tensor, root)).tolist() == [root] * 3
    assert tensor.tolist() == [hvd.rank()] * 3
    hvd.synchronize(hvd.broadcast_async_(tensor, root))
    assert tensor.tolist() == [root] * 3
    assert hvd.broadcast_(tensor + hvd.rank(), 0).tolist() == [root] * 3
    assert hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=root) == {"epoch": root}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_alltoalls() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.full((size,), rank)
    assert hvd.alltoall(tensor).tolist() == list(range(size))
    received, splits = hvd.alltoall(tensor, splits=torch.ones(size, dtype=torch.int32))
    assert received.tolist() == list(range(size))
    assert splits.tolist() == [1] * size
    handle = hvd.alltoall_async(tensor, splits=torch.ones(size, dtype=torch.int32), name="t")
    assert hvd.synchronize(handle)[0].tolist() == list(range(size))


def check_reducescatters() -> None:
    size = hvd.size()
    tensor = torch.arange(2.0 * size).reshape(2 * size, 1)
    own = tensor[2 * hvd.rank() : 2 * hvd.rank() + 2]
    assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), own * size)
    assert torch.allclose(hvd.synchronize(hvd.reducescatter_async(tensor)), own)
    first, second = hvd.grouped_reducescatter([tensor, 2 * tensor], op=hvd.Sum)
    assert torch.equal(second, 2 * first)
    first, _ = hvd.synchronize(hvd.grouped_reducescatter_async([tensor, tensor], op=hvd.Sum))
    assert torch.equal(first, own * size)


def check_uneven_work() -> None:
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(torch.ones(10), name="step")
    assert hvd.join() == hvd.size() - 1
    hvd.barrier()


@needs(ranks=2)
def check_process_sets() -> None:
    evens = hvd.ProcessSet(range(0, hvd.size(), 2))
    hvd.add_process_set(evens)
    if evens.included():
        result = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=evens)
        assert result.tolist() == [evens.size()] * 2
        assert evens.ranks[evens.rank()] == hvd.rank()
    everyone = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.global_process_set)
    assert everyone.item() == hvd.global_process_set.size()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, process_set=evens)
    optimizer.set_backward_passes_per_step(2)  # also of ranks that are not in the process set
    del optimizer
    assert hvd.remove_process_set(evens)


def check_training() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), hvd.SyncBatchNorm(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=2,
        op=hvd.Average,
        gradient_predivide_factor=2.0,
        num_groups=0,
        groups=None,
        sparse_as_dense=False,
        process_set=hvd.global_process_set,
    )
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(6, 4)).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    for value in model.state_dict().values():
        assert torch.equal(hvd.broadcast(value, 0), value)


def check_timeline() -> None:
    path = os.path.join(tempfile.gettempdir(), f"timeline-{os.getpid()}.json")
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(5), name="recorded")
    hvd.stop_timeline()
    if hvd.rank() == 0:
        events = json.loads(Path(path).read_text())["traceEvents"]
        assert any("recorded" in event["name"] for event in events)
        os.unlink(path)


def check_errors() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    if hvd.size() == 1:
        return
    with expect(hvd.HorovodInternalError, "shape"):
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="shapes")

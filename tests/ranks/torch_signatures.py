"""The names and signatures of MPI training scripts, beyond the common collectives."""

from __future__ import annotations

import copy
import importlib.util
import io
import warnings
from itertools import combinations

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import assert_same_bits


def check_what_scripts_ask() -> None:
    assert hvd.mpi_built()
    assert not hvd.gloo_built()
    assert not hvd.gloo_enabled()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert hvd.nccl_built() == 0 or hvd.nccl_built() > 21400
    assert hvd.cuda_built()
    assert not hvd.rocm_built()
    assert hvd.mpi_enabled() == (ringdl.get_communicator()._shared.mpi is not None)
    assert isinstance(hvd.mpi_threads_supported(), bool)
    everyone = hvd.allgather_object((hvd.local_rank(), hvd.cross_rank(), hvd.cross_size()))
    same = [cross for local, cross, _ in everyone if local == hvd.local_rank()]
    assert same == list(range(hvd.cross_size()))
    assert hvd.is_homogeneous() == (len({hvd.local_size()}) == 1)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def check_scales() -> None:
    size = hvd.size()
    x = torch.full((5,), 3.0)
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).tolist() == [1.5 * size] * 5
    assert hvd.allreduce(x, postscale_factor=2.0).tolist() == [6.0] * 5
    assert x.tolist() == [3.0] * 5
    whole = torch.tensor([3, -3])
    hvd.allreduce_(whole, op=hvd.Sum, prescale_factor=0.5)
    assert whole.tolist() == [size, -size]
    parts = [torch.full((3,), 1.0), torch.full((100_000,), 2.0)]
    done = hvd.synchronize(
        hvd.grouped_allreduce_async(parts, op=hvd.Sum, prescale_factor=4.0, postscale_factor=0.5)
    )
    assert [part[0].item() for part in done] == [2.0 * size, 4.0 * size]
    assert parts[0][0] == 1
    rows = torch.ones(2 * size, 3)
    mine = hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    assert mine.shape == (2, 3)
    assert (mine == 6 * size).all()
    assert (rows == 1).all()
    half = hvd.reducescatter(rows / 3, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert torch.equal(half, half.half().float())


def check_grouped_exchanges() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [torch.full((rank + 1, 2), float(rank)), torch.tensor([rank])]
    first, second = hvd.grouped_allgather(tensors, name="both")
    assert len(first) == size * (size + 1) // 2
    assert second.tolist() == list(range(size))
    parts = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size, 2)], op=hvd.Sum)
    assert [tuple(part.shape) for part in parts] == [(1,), (2, 2)]
    assert all((part == size).all() for part in parts)
    handle = hvd.grouped_reducescatter_async([torch.ones(size)] * 2, name="two")
    assert [part.tolist() for part in hvd.synchronize(handle)] == [[1.0]] * 2


def check_alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.alltoall(torch.full((size,), rank)).tolist() == list(range(size))
    splits = torch.arange(size)
    rows = torch.full((int(splits.sum()),), float(rank))
    received, counts = hvd.alltoall(rows, splits)
    assert counts.tolist() == [rank] * size
    assert counts.dtype == splits.dtype
    assert received.tolist() == [float(other) for other in range(size) for _ in range(rank)]
    received, counts = hvd.synchronize(hvd.alltoall_async(torch.full((size,), rank), name="a"))
    assert received.tolist() == list(range(size))
    assert counts.tolist() == [1] * size


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    weights = torch.arange(1.0, 4.0) * (rank + 1)
    total = size * (size + 1) / 2
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        x = torch.ones(3, requires_grad=True)
        (hvd.allreduce(x, op=op, prescale_factor=2.0) * weights).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.arange(1.0, 4.0) * total * factor * 2)
    x, y = (torch.ones(n, requires_grad=True) for n in (2, 3))
    one, two = hvd.grouped_allreduce([x, y], op=hvd.Sum, name="pair")
    (one.sum() * (rank + 1) + two.sum()).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [total] * 2
    assert y.grad.tolist() == [size] * 3

    x = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(x, name="rows")
    (gathered * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    torch.testing.assert_close(x.grad, torch.full_like(x, total / size))

    x = torch.ones(4, requires_grad=True)
    (hvd.broadcast(x, size - 1) * (rank + 1)).sum().backward()
    assert x.grad is not None
    expected = total / size if rank == size - 1 else 0.0
    torch.testing.assert_close(x.grad, torch.full((4,), expected))

    x = torch.ones(size, requires_grad=True)
    moved = hvd.alltoall(x)
    assert isinstance(moved, torch.Tensor)
    (moved * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(other + 1) for other in range(size)]

    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        x = torch.ones(2 * size, requires_grad=True)
        (hvd.reducescatter(x, op=op) * (rank + 1)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [float(factor * (i // 2 + 1)) for i in range(2 * size)]
    x = torch.ones(2, requires_grad=True)
    with expect(ringdl.UsageError, "has no gradient"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


@needs(ranks=2)
def check_a_name_in_flight() -> None:
    x = torch.ones(3)
    handle = hvd.allreduce_async(x, name="one")
    with expect(ValueError, "'one' is in flight on this rank already"):
        hvd.allreduce_async(x, name="one")
    with expect(ValueError, "in flight"):
        hvd.allreduce(x, name="one")
    other = hvd.allgather_async(x, name="one")  # names are apart for each kind
    hvd.synchronize(handle)
    hvd.synchronize(other)
    for _ in range(3):
        hvd.allreduce(x, name="one")
    handle = hvd.allreduce_async(x, name="one")
    while not hvd.poll(handle):
        pass
    assert hvd.allreduce(x, name="one").tolist() == [1.0] * 3
    with expect(RuntimeError, "shape"):
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="sick")
    assert hvd.allreduce(x, name="sick").tolist() == [1.0] * 3


def check_sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    indices = torch.tensor([[rank, size]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.ones(2, 3), (size + 1, 3), check_invariants=False
    )
    for op, factor in ((hvd.Sum, 1), (hvd.Average, 1 / size)):
        handle = hvd.sparse_allreduce_async(sparse, "rows", op)
        dense = handle().to_dense()
        torch.testing.assert_close(dense[:size], torch.full((size, 3), 1.0 * factor))
        torch.testing.assert_close(dense[size], torch.full((3,), size * factor * 1.0))
    assert hvd.synchronize(hvd.sparse_allreduce_async(sparse, "again", hvd.Sum)).is_coalesced()
    with expect(ringdl.UsageError, "takes a sparse tensor"):
        hvd.sparse_allreduce_async(torch.ones(3), "dense", hvd.Sum)
    its = torch.ones(3) if rank == 0 else sparse
    with expect(ringdl.UsageError if rank == 0 else ringdl.MismatchError, "takes a sparse tensor"):
        hvd.synchronize(hvd.sparse_allreduce_async(its, "one dense", hvd.Sum))
    assert hvd.synchronize(hvd.sparse_allreduce_async(sparse, "one dense", hvd.Sum)).is_sparse


@needs(ranks=2)
def check_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.included()
    assert hvd.global_process_set.rank() == rank
    even = hvd.add_process_set(range(0, size, 2))
    odd = hvd.add_process_set(hvd.ProcessSet([*range(1, size, 2)]))
    assert even.process_set_id != odd.process_set_id
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    assert mine.included()
    assert not other.included()
    assert mine.ranks is not None
    assert mine.rank() == mine.ranks.index(rank)
    assert mine.size() == len(mine.ranks)
    total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=mine)
    assert total.item() == sum(mine.ranks)
    root = mine.ranks[-1]
    assert hvd.broadcast(torch.tensor([rank]), root, process_set=mine).item() == root
    assert hvd.broadcast_object(rank, root, process_set=mine) == root
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
    x = torch.ones(2, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, process_set=mine).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [len(mine.ranks)] * 2
    hvd.barrier(process_set=mine)
    with expect(ValueError, "is not in ProcessSet"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with expect(ValueError, "is not in ProcessSet"):
        assert other.ranks is not None
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    with expect(ValueError, "already"):
        hvd.add_process_set(hvd.ProcessSet(reversed(mine.ranks)))
    with expect(ValueError, "not registered"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    assert hvd.remove_process_set(even)
    assert hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert even.process_set_id is None
    assert even.size() is None
    assert even.rank() is None


def check_predivided_gradients() -> None:
    models = [torch.nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), 0)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            hvd.Compression.none,
            1,
            hvd.Average,
            factor,
        )
        for model, factor in zip(models, (1.0, 8.0), strict=True)
    ]
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)  # a power of two: the same bits
        assert_same_bits([ours.detach()])
    with expect(ringdl.UsageError, "only averages are divided"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(torch.nn.Linear(2, 2).parameters()),
            op=hvd.Sum,
            gradient_predivide_factor=2.0,
        )


def check_groups_change_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    parameters = [*model.parameters()]
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), groups=[parameters[:2], parameters[2:]]
    )
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for parameter in parameters:
        assert_same_bits([parameter.detach()])
    with expect(ringdl.UsageError, "twice"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(torch.nn.Linear(2, 2).parameters()),
            groups=[parameters[:1], parameters[:1]],
        )


def check_step_after_synchronize_warns_once() -> None:
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for is_skipped in (True, False, False):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.synchronize()
            if is_skipped:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
    words = "optimizer.step() called without optimizer.skip_synchronize() "
    assert [str(each.message)[: len(words)] for each in seen] == [words]


@needs(ranks=3)
def check_overlapping_process_sets() -> None:
    """Each rank is in several, and meets them in an order of its own."""
    sets = [hvd.add_process_set(pair) for pair in combinations(range(hvd.size()), 2)]
    mine = [each for each in sets if each.included()]
    order = mine if hvd.rank() % 2 == 0 else mine[::-1]
    handles = [
        (each, hvd.allreduce_async(torch.ones(3) * hvd.rank(), op=hvd.Sum, process_set=each))
        for each in order
    ]
    for each, handle in handles:
        assert each.ranks is not None
        assert hvd.synchronize(handle).tolist() == [sum(each.ranks)] * 3
    for each in sets:
        assert hvd.remove_process_set(each)


def check_compression() -> None:
    """Where it means nothing, arrays travel as they are; by hand it narrows and widens."""
    size, fp16 = hvd.size(), hvd.Compression.fp16
    for x in (torch.arange(5), torch.ones(5, dtype=torch.float64), torch.ones(5).half()):
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum, compression=fp16), x * size)
    assert hvd.allreduce(torch.ones(3), op=hvd.Max, compression=fp16).tolist() == [1.0] * 3
    assert hvd.grouped_allreduce([torch.ones(3)], compression=hvd.Compression.none)[0][0] == 1
    third = torch.full((4,), 1 / 3)
    narrow, context = fp16.compress(third)
    assert narrow.dtype == torch.float16
    assert fp16.decompress(narrow, context).dtype == torch.float32
    same, context = hvd.Compression.none.compress(third)
    assert same is third
    assert hvd.Compression.none.decompress(same, context) is third
    with expect(ringdl.UsageError, "take Compression.none"):
        hvd.allreduce(third, compression=object())


def check_copies_of_models() -> None:
    """They train, and so do those of a file."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), hvd.SyncBatchNorm(2))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert copied[1].process_set is hvd.global_process_set
        copied(torch.randn(4, 3)).sum().backward()


def check_ranks_outside_of_the_process_set() -> None:
    first = hvd.ProcessSet([0])
    if hvd.size() > 1:
        hvd.add_process_set(first)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        process_set=first if hvd.size() > 1 else hvd.global_process_set,
    )
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.equal(model.weight, before - 0.1)
    if hvd.size() > 1:
        del optimizer
        assert hvd.remove_process_set(first)


def check_objects_that_pickle_refuses() -> None:
    if importlib.util.find_spec("cloudpickle") is None:
        return
    factor = 3
    triple = hvd.broadcast_object(lambda x: factor * x, root_rank=0)
    assert triple(2) == 6


def check_passes_can_change() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    optimizer.set_backward_passes_per_step(2)
    x = torch.full((1, 2), hvd.rank() + 1.0)
    model(x).sum().backward()
    assert model.weight.grad[0, 0] == hvd.rank() + 1
    model(x).sum().backward()
    assert model.weight.grad[0, 0] == hvd.size() + 1
    optimizer.step()

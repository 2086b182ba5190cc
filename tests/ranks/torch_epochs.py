"""Wrapped optimizers and process sets go on after shutdown() and init(), also with other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks._outside import world
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    take_step,
    whole_batch,
    wrap,
)


def _again(comm: Any = None) -> None:
    hvd.shutdown()
    hvd.init(comm)


def check_training_goes_on() -> None:
    """The same parameters as one process gets, whatever the state of the gradients in between."""
    ways: list[Callable[[torch.nn.Module, torch.optim.Optimizer], None]] = [
        lambda model, optimizer: None,
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    ]
    for make in OPTIMIZERS.values():
        model, reference = make_mlp(), make_mlp()
        optimizer = wrap(make(model.parameters()), model)
        bare = make(reference.parameters())
        for step in range(6):
            if step % 2:
                ways[step // 2](model, optimizer)
                _again()
            take_step(model, optimizer, *map(part, whole_batch(step)))
            take_step(reference, bare, *whole_batch(step))
        assert_close(model, reference)
        assert_same_bits(model.parameters())


def check_accumulated_gradients_go_on() -> None:
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, backward_passes_per_step=3)
    bare = torch.optim.SGD(reference.parameters(), lr=0.1)
    for turn in range(2):
        for passes in range(3):
            if passes == turn + 1:
                _again()
            loss_of(model, *map(part, whole_batch(passes))).backward()
            loss_of(reference, *whole_batch(passes)).backward()
        optimizer.step()
        bare.step()
        optimizer.zero_grad()
        bare.zero_grad()
    assert_close(model, reference)


def check_a_rank_without_a_backward_goes_on() -> None:
    """It joins in step(), and so do its buckets."""
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    take_step(model, optimizer, *map(part, whole_batch(0)))
    _again()
    optimizer.zero_grad()
    if hvd.rank() != 0 or hvd.size() == 1:
        loss_of(model, *map(part, whole_batch(1))).backward()
    optimizer.step()
    assert_same_bits(model.parameters())


@needs(ranks=2)
def check_replicas_are_compared_again() -> None:
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    take_step(model, optimizer, *map(part, whole_batch(0)))
    _again()
    if hvd.rank() == 0:
        with torch.no_grad():
            model[0].bias.add_(1)
    with expect(ringdl.MismatchError, "broadcast_parameters"):
        take_step(model, optimizer, *map(part, whole_batch(1)))


def check_several_optimizers_go_on() -> None:
    """In another order than they were made, with others that are made in between; sparse ones."""
    model = make_mlp()
    table = torch.nn.Embedding(20, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    first = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    second = wrap(torch.optim.SGD(table.parameters(), lr=0.1), table)
    changes = make_mlp(2)
    third = wrap(torch.optim.SGD(changes.parameters(), lr=0.1), changes, op=hvd.Adasum)

    def step_all() -> None:
        rows = torch.arange(hvd.rank(), 8)
        for optimizer, loss in (
            (second, lambda: table(rows).square().sum()),
            (third, lambda: loss_of(changes, *map(part, whole_batch(0)))),
            (first, lambda: loss_of(model, *map(part, whole_batch(0)))),
        ):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    step_all()
    _again()
    other = make_mlp(3)
    fourth = wrap(torch.optim.SGD(other.parameters(), lr=0.1), other)
    for _ in range(2):
        step_all()
        take_step(other, fourth, *map(part, whole_batch(0)))
    first.replan()
    step_all()
    for each in (model, table, changes, other):
        assert_same_bits(each.parameters())


@needs(ranks=2)
def check_process_sets_stay() -> None:
    size = hvd.size()
    even = hvd.add_process_set(range(0, size, 2))
    last = hvd.add_process_set([size - 1])
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, process_set=even)
    for _ in range(3):
        take_step(model, optimizer, *map(part, whole_batch(0)))
        if even.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=even).item()
            assert total == even.size() == len(range(0, size, 2))
        _again()
    assert even.process_set_id == 1
    with expect(ringdl.UsageError, "there is ProcessSet(process_set_id="):
        hvd.add_process_set([size - 1])
    hvd.shutdown()
    hvd.init(process_sets=[hvd.ProcessSet([1]), even])
    assert even.process_set_id == 2
    assert last.process_set_id is None
    hvd.shutdown()
    hvd.init(process_sets=[])
    assert even.process_set_id is None


@needs(ranks=3, mpi=True)
def check_other_ranks_go_on() -> None:
    """All ranks, then all but the last, then all again, as one process would have trained."""
    from mpi4py import MPI

    size, rank = world.size, world.rank
    model, reference = make_mlp(), make_mlp()
    make = OPTIMIZERS["adamw"]
    optimizer, bare = wrap(make(model.parameters()), model), make(reference.parameters())
    pair = hvd.add_process_set([0, size - 1])
    some = MPI.COMM_WORLD.Split(rank == size - 1, key=rank)
    for epoch, comm in enumerate((None, some, None)):
        if epoch > 0:
            _again(comm)
        if comm is not None:
            assert hvd.size() == (1 if rank == size - 1 else size - 1)
            with expect(ringdl.UsageError, f"rank {size - 1} is not a rank"):
                hvd.allreduce(torch.ones(1), process_set=pair)
        else:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            if pair.included():
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
        for step in range(2 * epoch, 2 * epoch + 2):
            take_step(reference, bare, *whole_batch(step))
            if comm is None or rank < size - 1:
                _weighted_step(model, optimizer, *whole_batch(step))
    assert_same_bits(model.parameters())
    assert_close(model, reference)
    some.Free()
    hvd.remove_process_set(pair)


def _weighted_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor
) -> None:
    """Whatever number of ranks there is, parts of a batch count as their rows do."""
    parts = [each.tensor_split(hvd.size())[hvd.rank()] for each in batch]
    weight = len(parts[0]) * hvd.size() / len(batch[0])
    optimizer.zero_grad()
    (weight * loss_of(model, *parts)).backward()
    optimizer.step()

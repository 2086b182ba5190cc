"""Wrong use: one sentence that says what to do, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator
from tests.ranks.support import expect, needs, until
from tests.ranks.torch_helpers import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    take_step,
    whole_batch,
    wrap,
)


def steps(optimizer: torch.optim.Optimizer, model: torch.nn.Module, by_hand: bool = False) -> str:
    """What warnings say of three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, *map(part, whole_batch(step))).backward()
            for parameter in model.parameters() if by_hand else ():
                hvd.allreduce_(parameter.grad)
            optimizer.step()
    return "\n".join(str(warning.message) for warning in caught)


@needs(ranks=2)
def check_an_optimizer_that_is_not_wrapped() -> None:
    for by_hand in (True, False):
        model = make_mlp()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        said = steps(torch.optim.SGD(model.parameters(), lr=0.1), model, by_hand)
        assert ("wrap it: optimizer = hvd.DistributedOptimizer" in said) == (not by_hand), said
        assert said.count("wrap it") <= 1
    model = make_mlp()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert not steps(wrap(torch.optim.SGD(model.parameters(), lr=0.1), model), model)


@needs(ranks=2, seconds=True)
def check_one_rank_that_does_not_wrap() -> None:
    last = hvd.rank() == hvd.size() - 1
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [] if last else ["Every rank has to wrap its optimizer: optimizer = "]
    with expect(ringdl.MismatchError, "DistributedOptimizer", *own, within=10):
        hvd.barrier() if last else wrap(optimizer, model)
    hvd.barrier()


@needs(ranks=2, seconds=True)
def check_fewer_batches_on_one_rank() -> None:
    """What is said names the cure."""
    last = hvd.rank() == hvd.size() - 1
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with expect(
        ringdl.MismatchError, "gradient bucket", "a rank that has no batch left calls", within=10
    ):
        for step in range(2 if last else 3):
            take_step(model, optimizer, *map(part, whole_batch(step)))
        hvd.barrier()


@needs(ranks=2)
def check_parameters_that_differ() -> None:
    last = hvd.rank() == hvd.size() - 1
    model = torch.nn.Linear(3, 4 if last else 5)
    with expect(ringdl.MismatchError, "ranks disagree on their buckets: shape of gradient 1"):
        wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model = torch.nn.Linear(3, 4, bias=not last)
    with expect(ringdl.MismatchError, "Pass the same gradients in the same order on all ranks"):
        wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with expect(ringdl.MismatchError, "build the same model on all ranks"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def check_what_cannot_be_broadcast() -> None:
    model = make_mlp()
    with expect(ringdl.UsageError, "pass model.state_dict()"):
        hvd.broadcast_parameters(model, root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with expect(ValueError, "call broadcast_optimizer_state(optimizer)"):
        hvd.broadcast_parameters(optimizer.state_dict(), root_rank=0)


def check_a_name_twice(comm: Communicator) -> None:
    first = hvd.allreduce_async(torch.ones(3), name="twice")
    with expect(ringdl.UsageError, "'twice' is in flight on this rank already", "synchronize()"):
        hvd.allreduce_async(torch.ones(3), name="twice")
    with expect(ValueError, "or take another name"):
        hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.synchronize(first)
    comm.barrier()


def check_a_name_whose_handle_was_dropped(comm: Communicator) -> None:
    """It is in flight until its work has ended, and others after it: as scripts expect."""
    size = comm.size
    for first in range(size):
        if comm.rank == first:
            hvd.allreduce_async(torch.ones(5000), name="dropped")
            with expect(ValueError, "'dropped' is in flight on this rank already"):
                hvd.allreduce_async(torch.ones(5000), name="dropped")
        hvd.barrier()
        if comm.rank != first:  # ends the work, now or a little later
            hvd.allreduce_async(torch.ones(5000), name="dropped")
        hvd.barrier()
        assert until(lambda: comm.stats()["works_in_flight"] == 0)
        result = hvd.allreduce(torch.ones(5000), name="dropped", op=hvd.Sum)
        assert result[0] == size
    for _ in range(50):  # let go again and again
        hvd.allgather_async(torch.ones(3), name="dropped")
        assert until(lambda: comm.stats()["works_in_flight"] == 0)
        hvd.barrier()


@needs(ranks=2)
def check_one_rank_passes_no_tensor() -> None:
    """The others hear of it, and unnamed calls stay in step."""
    size = hvd.size()
    x = torch.ones(size, requires_grad=True)
    calls = (
        hvd.allreduce,
        hvd.allreduce_,
        lambda x: hvd.allreduce(x, name="x", compression=hvd.Compression.fp16),
        hvd.allgather,
        lambda x: hvd.broadcast(x, 0),
        hvd.reducescatter,
        hvd.alltoall,
    )
    for wrong in (1.0, [1.0], np.ones(size)):
        kind = type(wrong).__name__
        for call in calls:
            for rank in range(size):
                with (
                    expect(ringdl.UsageError, f"not {kind}: pass torch.as_tensor(x)", within=5)
                    if hvd.rank() == rank
                    else expect(ringdl.MismatchError, f"rank {rank} cannot make", kind, within=5)
                ):
                    call(wrong if hvd.rank() == rank else x.detach())
    for splits in (torch.ones(size), "all"):
        with (
            expect(ValueError, "alltoall: splits is", within=5)
            if hvd.rank() == 0
            else expect(ringdl.MismatchError, "rank 0 cannot make the", "splits", within=5)
        ):
            hvd.alltoall(x, splits if hvd.rank() == 0 else [1] * size)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [size] * size
    assert hvd.alltoall(x)[0].item() == 1
    assert hvd.allgather(x).numel() == size * size


@needs(ranks=2)
def check_one_rank_cannot_make_a_call_of_several_steps() -> None:
    """What is wrong before the first of them is told to the others."""
    model, size = make_mlp(), hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def wrap_it(optimizer: Any, named: Any) -> None:
        hvd.DistributedOptimizer(optimizer, named)

    named = list(model.named_parameters())
    other = list(torch.nn.Linear(4, 2).named_parameters())
    calls: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], str]] = [
        (hvd.broadcast_parameters, (model.state_dict(),), (model,), "model.state_dict()"),
        (hvd.broadcast_parameters, (model.state_dict(),), (5,), "not a int"),
        (hvd.broadcast_optimizer_state, (optimizer,), (model,), "not a Sequential"),
        (wrap_it, (optimizer, named), (optimizer, other), "lacks"),
        (wrap_it, (optimizer, named), (optimizer, model), "(name, parameter) pairs"),
        (wrap_it, (optimizer, named), (model, named), "not a Sequential"),
        (ringdl.average_metrics, ({"a": 1.0},), ({"a": "text"},), "metric 'a' is 'text'"),
    ]
    for call, right, wrong, why in calls:
        for rank in range(size):
            with (
                expect(ringdl.UsageError, why, within=5)
                if hvd.rank() == rank
                else expect(ringdl.MismatchError, f"rank {rank} cannot make", why, within=5)
            ):
                call(*(wrong if hvd.rank() == rank else right))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
        call(*right)
    if hvd.rank() == 0:  # with Adasum nobody waits for who wraps, nor may hear of it later
        with expect(ringdl.UsageError, "lacks"):
            hvd.DistributedOptimizer(optimizer, other, op=hvd.Adasum)
    hvd.barrier()
    hvd.DistributedOptimizer(optimizer, named)
    with expect(ringdl.UsageError, "synchronize(5)"):
        hvd.synchronize(5)  # type: ignore[call-overload]


def check_a_cell_that_runs_twice() -> None:
    """The new wrapper replaces the old one, also after shutdown() and init()."""
    model = make_mlp()
    bare_model, old = make_mlp(), None
    for turn in range(4):
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model)
        bare = torch.optim.SGD(bare_model.parameters(), lr=0.1, momentum=0.5)
        if turn == 1:
            wrap(optimizer, model)  # the same object
        if old is not None:
            for call in (old.step, old.synchronize, old.replan):
                with expect(ringdl.UsageError, "has replaced this one: step that one"):
                    call()
        old = optimizer
        for step in range(2):
            take_step(model, optimizer, *map(part, whole_batch(step)))
            take_step(bare_model, bare, *whole_batch(step))
        if turn == 2:
            hvd.shutdown()
            hvd.init()
    assert_close(model, bare_model)
    assert_same_bits(model.parameters())
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1


def check_one_optimizer_in_several_ways() -> None:
    """Wrapped again with other options: the last ones count."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bare_class = type(optimizer)
    nobody = hvd.size() - 1
    only = hvd.add_process_set([nobody]) if hvd.size() > 1 else hvd.global_process_set
    for options in ({"op": hvd.Adasum}, {"process_set": only}, {"op": hvd.Sum}, {}):
        wrap(optimizer, model, **options)
        assert type(optimizer).__bases__[1] is bare_class
        assert isinstance(optimizer._parameter_names[model[0].weight], str)
    reference = make_mlp()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        take_step(model, optimizer, *map(part, whole_batch(step)))
        take_step(reference, plain, *whole_batch(step))
    assert_close(model, reference)
    hvd.remove_process_set(only)


def check_arrays_of_devices() -> None:
    x = torch.empty(24, device="meta")
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with expect(ringdl.UsageError, "device meta", "CPU"):
            call(x)
    with expect(ringdl.UsageError, "device meta", "CPU"):
        hvd.broadcast(x, 0)
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with expect(ringdl.UsageError, "on meta", "on the CPU"):
        wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with expect(ringdl.MismatchError, "on meta; move the model to the CPU"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()


def check_calls_before_init() -> None:
    hvd.shutdown()
    model = make_mlp()
    for call in (
        hvd.rank,
        hvd.barrier,
        hvd.join,
        lambda: hvd.allreduce(torch.ones(3)),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.broadcast_parameters(model.state_dict(), 0),
        lambda: hvd.average_metrics({"loss": 1.0}),
        lambda: hvd.SyncBatchNorm(3)(torch.ones(2, 3)),
        lambda: hvd.start_timeline("timeline.json"),
        lambda: wrap(torch.optim.SGD(model.parameters(), lr=0.1), model),
    ):
        with expect(ringdl.UsageError, "call ringdl.init() first"):
            call()
    hvd.init()

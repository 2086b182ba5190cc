"""Wrong use: one sentence that says what to do, on every rank."""

from __future__ import annotations

import warnings

import torch

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import loss_of, make_mlp, part, whole_batch, wrap


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


def check_two_wraps() -> None:
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with expect(ringdl.UsageError, "is wrapped in DistributedOptimizer already"):
        wrap(optimizer, model)
    with expect(ringdl.UsageError, "belongs to another wrapped optimizer; drop that one"):
        wrap(torch.optim.Adam(model.parameters()), model)


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

"""States of networks that are cut over ranks, and what is not exchanged as if it were whole."""

from __future__ import annotations

import copy

import torch

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator
from ringdl.torch import parallel
from tests.ranks.support import expect, needs
from tests.ranks.torch_pipelines import all_ranks, alone


class Strange(torch.nn.Linear):
    """Its weight is cut; parameters and buffers are of dtypes that are not reduced."""

    def __init__(self, its: Communicator) -> None:
        super().__init__(2, 2 * its.size, bias=False, dtype=torch.complex64)
        with torch.no_grad():
            self.weight.copy_(torch.arange(4 * its.size).reshape(-1, 2) * 1j)
        parallel.cut_parameter(self, "weight", parallel.Cut(its, 0, 2 * its.size))
        table = torch.arange(3).to(torch.uint32)
        self.register_buffer("table", table)
        self.register_buffer("scale", torch.ones((), dtype=torch.float8_e4m3fn))


def check_states_of_every_dtype() -> None:
    its = all_ranks()
    state = parallel.state_dict(Strange(its))
    expected = torch.arange(4 * its.size).reshape(-1, 2) * 1j
    assert torch.equal(state["weight"], expected.to(torch.complex64))
    assert state["table"].dtype == torch.uint32


@needs(ranks=2)
def check_parts_are_not_broadcast() -> None:
    """The usual call would make all parts rank 0's."""
    its = all_ranks()
    model = torch.nn.Sequential(parallel.ParallelMLP(4, 2 * its.size, communicator=its))
    before = copy.deepcopy(model.state_dict())
    with expect(ringdl.MismatchError, "ranks have different parts of '0.down.weight'; pass"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    hvd.broadcast_parameters(model.state_dict(), 0, alone())
    optimizer = torch.optim.Adam(model.parameters())
    with expect(ringdl.UsageError, "different parts of this optimizer's parameters"):
        hvd.broadcast_optimizer_state(optimizer)
    hvd.broadcast_optimizer_state(optimizer, 0, process_set=alone())
    with expect(ringdl.UsageError, "different parts of '0.up.weight', and a TorchState"):
        hvd.elastic.TorchState(model, optimizer)
    hvd.broadcast_parameters(torch.nn.Linear(2, 2).state_dict(), root_rank=0)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    on_meta = torch.nn.Sequential(parallel.ParallelMLP(4, 2 * its.size, communicator=its)).to(
        "meta"
    )
    for each in (model, on_meta.to_empty(device="cpu"), copy.deepcopy(model)):
        with expect(ringdl.MismatchError, "ranks have different parts of '0.down.weight'; pass"):
            hvd.broadcast_parameters(each.state_dict(), root_rank=0)
    with expect(ringdl.UsageError, "and so of its gradient; pass those that have the same one"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), process_set=alone())


@needs(ranks=2)
def check_networks_that_are_cut_in_different_ways() -> None:
    its = all_ranks()
    rank = its.rank
    for model in (
        parallel.ParallelMLP(4, 8 * its.size + 8 * its.size * (rank == 1), communicator=its),
        parallel.ColumnParallelLinear(4, 8 * its.size, bias=rank != 1, communicator=its),
    ):
        with expect(ringdl.MismatchError, "ranks have cut the network in different ways"):
            parallel.state_dict(model)
    size = its.size
    for cut in (parallel.Cut(its, 0, 2 * size - 1), parallel.Cut(its, 0, 2 * size, 2 * size + 1)):
        with expect(ringdl.UsageError, "and cannot be cut along dimension 0"):
            parallel.cut_parameter(torch.nn.Linear(3, 2 * size), "weight", cut)


@needs(ranks=2)
def check_ranks_along_model_begin_alike() -> None:
    """What they have whole is compared at the first step."""
    torch.manual_seed(hvd.rank())
    its = all_ranks()
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), parallel.ParallelMLP(4, 2 * its.size, communicator=its)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), process_set=alone()
    )
    model(torch.ones(2, 4)).sum().backward()
    with expect(ringdl.MismatchError, "'0.weight'", "begin with the same random numbers there"):
        optimizer.step()

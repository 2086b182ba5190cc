"""Two optimizers of one model over different communicators."""

from __future__ import annotations

import os

import torch
from mpi4py import MPI

import ringdl
import ringdl.torch as hvd
from ringdl import _mpi
from ringdl._communicator import communicator_over
from ringdl._settings import read_settings
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import bits, loss_of, make_mlp, whole_batch


def make_halves() -> ringdl.Communicator:
    """One communicator of the even ranks of the world, one of the odd ones."""
    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, key=world.rank)
    engine = _mpi.open_engine(MPI, half)
    half.Free()
    return communicator_over(engine, read_settings(os.environ))


class Experts(torch.nn.Module):
    """The base is everybody's, the expert belongs to a half."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base = make_mlp(seed)
        torch.manual_seed(seed)
        self.expert = torch.nn.Linear(3, 3).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.base(inputs)))


def rank_batch(rank: int, step: int) -> list[torch.Tensor]:
    return [tensor[2 * rank : 2 * rank + 2] for tensor in whole_batch(step)]


def optimizers_of(model: Experts) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(model.base.parameters(), lr=0.01),
        torch.optim.SGD(model.expert.parameters(), lr=0.1, momentum=0.9),
    ]


def check_base_and_experts() -> None:
    rank, size = ringdl.rank(), ringdl.size()
    halves = make_halves()
    model = Experts(seed=rank)
    optimizers = optimizers_of(model)
    hvd.broadcast_parameters(model.base.state_dict())
    hvd.broadcast_parameters(model.expert.state_dict(), process_set=halves)
    optimizers[1].param_groups[0]["lr"] = 0.1 * (1 + rank)
    hvd.broadcast_optimizer_state(optimizers[1], process_set=halves)
    hvd.DistributedOptimizer(optimizers[0], model.base.named_parameters())
    hvd.DistributedOptimizer(optimizers[1], model.expert.named_parameters(), process_set=halves)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, *rank_batch(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()

    # One process has the base once, and an expert and its optimizer for each half.
    experts = [Experts(seed=half) for half in range(min(2, size))]
    base = experts[0].base
    base_optimizer = optimizers_of(experts[0])[0]
    expert_optimizers = [optimizers_of(expert)[1] for expert in experts]
    for half, expert in enumerate(experts):
        expert.base = base
        expert_optimizers[half].param_groups[0]["lr"] = 0.1 * (1 + half)
    for step in range(4):
        for optimizer in (base_optimizer, *expert_optimizers):
            optimizer.zero_grad()
        for other in range(size):
            loss_of(experts[other % 2], *rank_batch(other, step)).backward()
        for parameter in base.parameters():
            parameter.grad /= size
        for half, expert in enumerate(experts):
            for parameter in expert.expert.parameters():
                parameter.grad /= len(range(half, size, 2))
        for optimizer in (base_optimizer, *expert_optimizers):
            optimizer.step()
    expected = [*base.parameters(), *experts[rank % 2].expert.parameters()]
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-10, atol=1e-12)
    digests = MPI.COMM_WORLD.allgather((bits(model.base.parameters()), bits(model.parameters())))
    assert len({base_bits for base_bits, _ in digests}) == 1
    assert len({all_bits for _, all_bits in digests}) == min(2, size)
    del optimizers, optimizer
    halves.shutdown()


@needs(ranks=3)
def check_replicas_of_a_half() -> None:
    """Only the half whose replicas differ is told; ranks are those of its communicator."""
    halves = make_halves()
    layer = make_mlp(seed=int(ringdl.rank() == 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters()), layer.named_parameters(), process_set=halves
    )
    loss_of(layer, *whole_batch(0)).backward()
    if ringdl.rank() % 2 == 0:
        with expect(ringdl.MismatchError, "rank 1 has other values than rank 0"):
            optimizer.step()
    else:
        optimizer.step()
    del optimizer
    halves.shutdown()

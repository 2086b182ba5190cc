"""Ranks with more and with fewer batches than others."""

from __future__ import annotations

import torch

import ringdl
import ringdl.torch as hvd
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


def batches_of(rank: int) -> int:
    return 2 + rank % 2


def check_uneven_batches() -> None:
    """As one rank that counts missing batches as zeros; twice, from the last one's parameters."""
    rank, size = hvd.rank(), hvd.size()
    for make in OPTIMIZERS.values():
        model, reference = make_mlp(), make_mlp()
        optimizer = wrap(make(model.parameters()), model)
        plain = make(reference.parameters())
        for epoch in range(2):
            for step in range(batches_of(rank)):
                take_step(model, optimizer, *map(part, whole_batch(step + 10 * epoch)))
            last = hvd.join()
            assert batches_of(last) == max(map(batches_of, range(size)))
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)
            for step in range(batches_of(last)):
                plain.zero_grad()
                inputs, targets = whole_batch(step + 10 * epoch)
                for other in range(size):
                    if batches_of(other) > step:
                        loss = loss_of(reference, part(inputs, other), part(targets, other))
                        (loss / size).backward()
                plain.step()
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.grad = None
            assert_close(model, reference)
            assert_same_bits(model.parameters())


def check_sparse_gradients_of_some() -> None:
    torch.manual_seed(3)
    model = torch.nn.EmbeddingBag(10, 4, sparse=True, mode="sum").double()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, op=hvd.Sum)
    expected = model.weight.detach().clone()
    for step in range(batches_of(hvd.rank())):
        optimizer.zero_grad()
        model(torch.tensor([[step, hvd.rank() + 4]])).sum().backward()
        optimizer.step()
    last = hvd.join()
    for other in range(hvd.size()):
        for step in range(batches_of(other)):
            expected[step] -= 1
            expected[other + 4] -= 1
    hvd.broadcast_parameters(model.state_dict(), last)
    torch.testing.assert_close(model.weight.detach(), expected)


@needs(ranks=2)
def check_forgotten_broadcast() -> None:
    """The first step after a join says that the parameters differ, and what mends it."""
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def train(step: int) -> None:
        take_step(model, optimizer, *map(part, whole_batch(step)))

    for step in range(batches_of(hvd.rank())):
        train(step)
    last = hvd.join()
    with expect(ringdl.MismatchError, "the replicas differ", "broadcast_parameters"):
        train(7)
    hvd.broadcast_parameters(model.state_dict(), last)
    train(7)
    assert_same_bits(model.parameters())

"""Buckets in the order in which gradients are made."""

from __future__ import annotations

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import expect
from tests.ranks.torch_helpers import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    part,
    take_step,
    wrap,
)


class Backwards(torch.nn.Module):
    """Its layers are registered last to first, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.last = torch.nn.Linear(9, 3)
        self.middle = torch.nn.Linear(8, 9)
        self.unused = torch.nn.Linear(2, 2)
        self.first = torch.nn.Linear(6, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return result


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(24, n, generator=generator, dtype=torch.float64) for n in (6, 3))
    return x, y


def filled(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """The layers in the order in which buckets hold their first gradients."""
    gradients = optimizer._ringdl_gradients
    places = {
        gradients._store.specs[index][0].split(".")[0]: view.data_ptr()
        for index, view in gradients._rounds.views.items()
    }
    assert places.keys() == {name for name, _ in model.named_children()}
    return sorted(places, key=lambda name: places[name])


def check_order_and_training() -> None:
    for make in OPTIMIZERS.values():
        model, reference = Backwards(), Backwards()
        optimizer = wrap(make(model.parameters()), model)
        plain = make(reference.parameters())
        assert filled(optimizer, model) == ["first", "unused", "middle", "last"]
        for step in range(4):
            x, y = batch(step)
            take_step(model, optimizer, part(x), part(y), step % 2 == 0)
            take_step(reference, plain, x, y, step % 2 == 0)
            if step == 0:
                before = [parameter.grad for parameter in model.parameters()]
                optimizer.replan()
                assert filled(optimizer, model) == ["last", "middle", "first", "unused"]
                for parameter, old in zip(model.parameters(), before, strict=True):
                    assert (parameter.grad is None) == (old is None)
                    assert old is None or torch.equal(parameter.grad, old)
        assert_close(model, reference)
        assert_same_bits(model.parameters())


def check_refusals() -> None:
    model = Backwards()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with expect(ringdl.UsageError, "replan() before the first backward()"):
        optimizer.replan()
    hvd.barrier()

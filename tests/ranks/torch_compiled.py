"""Models that torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ringdl.torch as hvd
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


def check_compiled_models() -> None:
    """Forward and backward are traced (without generated code, which needs a compiler)."""
    model, reference = make_mlp(), make_mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = wrap(OPTIMIZERS["adamw"](compiled.parameters()), compiled)
    plain = OPTIMIZERS["adamw"](reference.parameters())
    for step in range(4):
        inputs, targets = whole_batch(step)
        take_step(compiled, optimizer, part(inputs), part(targets), step % 2 == 0)
        take_step(reference, plain, inputs, targets, step % 2 == 0)
    assert_close(model, reference)
    assert_same_bits(model.parameters())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


def check_compiled_steps() -> None:
    """Of the optimizer alone, and of all that training does (Adam is rounded otherwise then)."""

    def step_of(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            return loss

        return step

    for is_whole in (False, True):
        model, reference = make_mlp(), make_mlp()
        optimizer = wrap(OPTIMIZERS["momentum"](model.parameters()), model)
        plain = OPTIMIZERS["momentum"](reference.parameters())
        if not is_whole:
            optimizer.step = compiled(optimizer.step)
        step = step_of(model, optimizer)
        if is_whole:
            step = compiled(step)
        for number in range(4):
            inputs, targets = whole_batch(number)
            step(part(inputs), part(targets))
            take_step(reference, plain, inputs, targets)
        assert_close(model, reference)
        assert_same_bits(model.parameters())


def check_collectives_within_compiled_functions() -> None:
    """With and without gradients; the same as without torch.compile."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x * 2, op=hvd.Sum).sin() + hvd.allreduce(x, name="named")

    def reduce_in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        hvd.allreduce_(y, op=hvd.Max)
        return y + hvd.grouped_allreduce([x, y])[1]

    def exchange(x: torch.Tensor) -> torch.Tensor:
        rows = hvd.allgather(x * 3)
        mine = hvd.alltoall(rows) + hvd.broadcast(x, hvd.size() - 1).sum()
        return mine + hvd.reducescatter(rows, op=hvd.Sum).sum()

    def wait_later(x: torch.Tensor) -> torch.Tensor:
        handle = hvd.allreduce_async(x.detach() * 2, name="later")
        y = x.cos()
        return y + hvd.synchronize(handle)

    for function in (reduce, reduce_in_place, exchange, wait_later):
        results = []
        for run in (function, compiled(function)):
            for _ in range(2):
                x = torch.arange(6.0).reshape(6, 1) + hvd.rank()
                x.requires_grad_(function is not reduce_in_place)
                result = run(x)
                if x.requires_grad:
                    result.square().sum().backward()
                results.append((result.detach(), x.grad))
        for result, gradient in results:
            torch.testing.assert_close(result, results[0][0])
            torch.testing.assert_close(gradient, results[0][1])

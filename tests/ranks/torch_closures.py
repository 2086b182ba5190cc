"""Closures see the gradients and the loss of all ranks; ranks that are out of step are told."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

import ringdl
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    whole_batch,
    wrap,
)


def backward(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    loss = loss_of(model, *map(part, whole_batch(step)))
    loss.backward()
    return loss


def step_both(
    loss_of_rank: Callable[[torch.nn.Module], torch.Tensor],
    loss_of_whole: Callable[[torch.nn.Module], torch.Tensor],
) -> None:
    """A step of LBFGS on all ranks is that of one process with what they do together."""
    model, reference = make_mlp(), make_mlp()
    for trained, compute, does_wrap in (
        (model, loss_of_rank, True),
        (reference, loss_of_whole, False),
    ):
        optimizer = torch.optim.LBFGS(trained.parameters(), max_iter=3)
        if does_wrap:
            optimizer = wrap(optimizer, trained)

        def closure(
            trained: torch.nn.Module = trained,
            compute: Callable[[torch.nn.Module], torch.Tensor] = compute,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = compute(trained)
            if loss.requires_grad:
                loss.backward()
            return loss

        optimizer.step(closure)
    assert_close(model, reference)
    assert_same_bits(model.parameters())


def check_loss_of_all_ranks() -> None:
    rank, size = ringdl.rank(), ringdl.size()
    for op in (ringdl.Average, ringdl.Sum):
        layer = torch.nn.Linear(2, 2).double()
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        optimizer = wrap(torch.optim.SGD(layer.parameters(), lr=0.1), layer, op=op)
        expected = size * (size + 1) / 2 / (size if op == ringdl.Average else 1)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            loss = optimizer.step(
                closure=lambda dtype=dtype: torch.full((), rank + 1.0, dtype=dtype)
            )
            assert loss.dtype == dtype
            assert loss == torch.tensor(expected, dtype=dtype)
        assert optimizer.step(lambda: rank + 1) == expected
        assert optimizer.step(lambda: None) is None
        thirds = optimizer.step(lambda: torch.tensor((rank + 1) / 3))
        assert_same_bits([thirds])


@needs(ranks=2)
def check_loss_missing_on_one_rank() -> None:
    model = make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    with expect(ringdl.MismatchError, "returned no loss on rank 1"):
        optimizer.step(lambda: None if ringdl.rank() == 1 else 1.0)


def check_closure_without_backward_on_some_ranks() -> None:
    """The rank's gradients count as zeros, in each evaluation."""
    inputs, targets = whole_batch(0)

    def loss_of_rank(model: torch.nn.Module) -> torch.Tensor:
        if ringdl.rank() > 0:
            return torch.zeros((), dtype=torch.float64)
        return loss_of(model, inputs, targets)

    def loss_of_whole(model: torch.nn.Module) -> torch.Tensor:
        return loss_of(model, inputs, targets) / ringdl.size()

    step_both(loss_of_rank, loss_of_whole)


def check_closure_in_reentrant_checkpoints() -> None:
    """Autograd has no callback there: the gradients are averaged when the closure returns."""
    inputs, targets = whole_batch(0)

    def loss_of_rank(model: torch.nn.Module) -> torch.Tensor:
        hidden = checkpoint(model[:2], part(inputs).requires_grad_(), use_reentrant=True)
        outputs = checkpoint(model[2:], hidden, use_reentrant=True)
        return torch.nn.functional.mse_loss(outputs, part(targets))

    def loss_of_whole(model: torch.nn.Module) -> torch.Tensor:
        return loss_of(model, inputs, targets)

    step_both(loss_of_rank, loss_of_whole)


@needs(ranks=2)
def check_other_numbers_of_evaluations() -> None:
    """Rank 1 is in its next step when the others evaluate again, with a backward or without."""
    for has_backward in (True, False):
        model = make_mlp()
        optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
        evaluations = 1 if ringdl.rank() == 1 else 2
        _evaluate_often(optimizer, evaluations)

        def closure(model: torch.nn.Module = model, does: bool = has_backward) -> torch.Tensor:
            return backward(model) if does else torch.zeros(())

        with expect(ringdl.MismatchError, "step 1 on rank", "step 2 on rank 1"):
            for _ in range(3):
                optimizer.step(closure)


def _evaluate_often(optimizer: torch.optim.Optimizer, evaluations: int) -> None:
    """Make ``step(closure)`` call its closure so often."""
    step = type(optimizer).__bases__[1].step

    def step_often(self: torch.optim.Optimizer, closure: Callable[[], torch.Tensor]) -> object:
        for _ in range(evaluations - 1):
            closure()
        return step.__wrapped__(self, closure)

    hooked = torch.optim.Optimizer.profile_hook_step(step_often)
    hooked.hooked = True
    type(optimizer).step = hooked


@needs(ranks=2)
def check_other_numbers_of_backward_passes() -> None:
    model = make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    for _ in range(2):
        backward(model)
        optimizer.step()
    texts = ("out of step", "step 3 on rank", "step 4 on rank 1")
    with expect(ringdl.MismatchError, *texts):
        for _ in range(3):
            backward(model)
            if ringdl.rank() != 1:
                backward(model)
            optimizer.step()


@needs(ranks=2)
def check_a_step_that_one_rank_leaves_out() -> None:
    model = make_mlp().bfloat16()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    inputs = part(whole_batch(0)[0]).bfloat16()
    with expect(ringdl.MismatchError, "step 2 on rank 1", "step 3 on rank"):
        for step in range(3):
            model(inputs).sum().backward()
            if step == 0 or ringdl.rank() != 1:
                optimizer.step()


@needs(ranks=2)
def check_another_number_of_passes_at_the_end() -> None:
    """The rank that has ended its training goes on to something else."""
    ringdl.shutdown()
    ringdl.init()  # checks before may have called from several threads: any of them might go on
    model = make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    with expect(ringdl.MismatchError, "ranks wait for one another"):
        backward(model)
        if ringdl.rank() != 1:
            backward(model)
        optimizer.step()
        ringdl.allreduce(torch.zeros(1), name="validation")


def check_whole_model_in_reentrant_checkpoints() -> None:
    """Averaged in ``synchronize()`` or ``step()``; with several passes, and kept gradients."""
    for passes, set_to_none in ((1, True), (2, False)):
        model, reference = make_mlp(), make_mlp()
        optimizer = wrap(OPTIMIZERS["momentum"](model.parameters()), model)
        reference_optimizer = OPTIMIZERS["momentum"](reference.parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            reference_optimizer.zero_grad(set_to_none=set_to_none)
            for index in range(passes):
                inputs, targets = whole_batch(10 * step + index)
                hidden = part(inputs).requires_grad_()
                for layers in (model[:2], model[2:4], model[4:]):
                    hidden = checkpoint(layers, hidden, use_reentrant=True)
                torch.nn.functional.mse_loss(hidden, part(targets)).backward()
                loss_of(reference, inputs, targets).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            optimizer.step()
            reference_optimizer.step()
        assert_close(model, reference)
        assert_same_bits(model.parameters())

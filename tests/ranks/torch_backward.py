"""When gradients are averaged: several backward passes, checkpointing, several optimizers,
failures."""

from __future__ import annotations

import contextlib
import time
import warnings

import torch
from torch.utils.checkpoint import checkpoint

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import expect
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

PASSES = 3


def _reference_accumulation(steps: int, set_to_none: bool) -> torch.nn.Module:
    reference = make_mlp()
    optimizer = OPTIMIZERS["adamw"](reference.parameters())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for index in range(PASSES):
            loss_of(reference, *whole_batch(10 * step + index)).backward()
        optimizer.step()
    return reference


def check_accumulation() -> None:
    """With no_sync, with backward_passes_per_step, and averaging in each pass: the same result."""
    for mode in ("no_sync", "passes", "each"):
        for set_to_none in (True, False):
            model = make_mlp()
            optimizer = wrap(
                OPTIMIZERS["adamw"](model.parameters()),
                model,
                backward_passes_per_step=PASSES if mode == "passes" else 1,
            )
            for step in range(4):
                optimizer.zero_grad(set_to_none=set_to_none)
                for index in range(PASSES):
                    is_local = mode == "no_sync" and index < PASSES - 1
                    with optimizer.no_sync() if is_local else contextlib.nullcontext():
                        batch = whole_batch(10 * step + index)
                        loss_of(model, *map(part, batch)).backward()
                optimizer.step()
            assert_close(model, _reference_accumulation(4, set_to_none))
            assert_same_bits(model.parameters())


def check_step_averages_what_no_sync_left() -> None:
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model, backward_passes_per_step=5)
    with optimizer.no_sync():
        loss_of(model, *map(part, whole_batch(0))).backward()
    loss_of(model, *map(part, whole_batch(1))).backward()
    optimizer.step()
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(2):
        loss_of(reference, *whole_batch(step)).backward()
    reference_optimizer.step()
    assert_close(model, reference)


def check_local_pass_after_an_averaged_one() -> None:
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    loss_of(model, *map(part, whole_batch(0))).backward()
    with optimizer.no_sync():
        loss_of(model, *map(part, whole_batch(1))).backward()
    optimizer.step()
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(2):
        loss_of(reference, *whole_batch(step)).backward()
    reference_optimizer.step()
    assert_close(model, reference)


def check_layer_used_only_under_no_sync() -> None:
    """A gradient from an earlier local pass counts as produced, though the last backward does not
    touch it."""
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    inputs, targets = whole_batch(0)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, part(inputs), part(targets)).backward()
        model[4](torch.ones(2, 7, dtype=torch.float64)).sum().backward()
        optimizer.step()
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for _ in range(3):
        reference_optimizer.zero_grad()
        loss_of(reference, inputs, targets).backward()
        reference[4](torch.ones(2, 7, dtype=torch.float64)).sum().backward()
        reference_optimizer.step()
    assert_close(model, reference)


def check_synchronize_and_skip_synchronize() -> None:
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["momentum"](model.parameters()), model)
    reference_optimizer = OPTIMIZERS["momentum"](reference.parameters())
    for step in range(4):
        inputs, targets = whole_batch(step)
        optimizer.zero_grad()
        loss_of(model, part(inputs), part(targets)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference_optimizer.zero_grad()
        loss_of(reference, inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        reference_optimizer.step()
    assert_close(model, reference)


class _Checkpointed(torch.nn.Module):
    """``shared`` is used outside and in two checkpoints; the outside use comes first in
    backward."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.mode = mode
        self.first = torch.nn.Linear(6, 5)
        self.middle = torch.nn.Linear(5, 5)
        self.shared = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 3)
        self.double()

    def _segment(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(torch.tanh(self.middle(hidden))))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            if self.mode == "plain":
                hidden = self._segment(hidden)
            else:
                hidden = checkpoint(self._segment, hidden, use_reentrant=self.mode == "reentrant")
        return self.last(self.shared(hidden))


def check_checkpointing() -> None:
    for mode in ("plain", "nonreentrant", "reentrant"):
        for passes in (1, 2):
            model, reference = _Checkpointed(mode), _Checkpointed("plain")
            optimizer = wrap(
                OPTIMIZERS["momentum"](model.parameters()), model, backward_passes_per_step=passes
            )
            reference_optimizer = OPTIMIZERS["momentum"](reference.parameters())
            for step in range(4):
                optimizer.zero_grad()
                reference_optimizer.zero_grad()
                for index in range(passes):
                    inputs, targets = whole_batch(10 * step + index)
                    loss_of(model, part(inputs), part(targets)).backward()
                    loss_of(reference, inputs, targets).backward()
                for parameter, expected in zip(
                    model.parameters(), reference.parameters(), strict=True
                ):
                    torch.testing.assert_close(
                        parameter.grad, expected.grad, rtol=1e-10, atol=1e-12
                    )
                optimizer.step()
                reference_optimizer.step()
            assert_close(model, reference)
            assert_same_bits(model.parameters())


def check_checkpoints_in_threads_of_devices(comm: ringdl.Communicator) -> None:
    """There, autograd has the outer backward below the Python stack; so it is begun here."""

    def backward(loss: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)

    works = []
    for begin in (torch.Tensor.backward, backward):
        torch.manual_seed(5)
        first, second, third = (torch.nn.Linear(3, 3).double() for _ in range(3))
        model = torch.nn.ModuleList([first, second, third])
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        before = comm.stats()["works"]
        for _ in range(2):
            inputs = torch.full((2, 3), 1.0 + comm.rank, dtype=torch.float64, requires_grad=True)
            hidden = checkpoint(second, first(inputs), use_reentrant=True)
            hidden = checkpoint(third, hidden, use_reentrant=True)
            begin(first(hidden).sum())
            optimizer.step()
            optimizer.zero_grad()
        works.append(comm.stats()["works"] - before)
        assert_same_bits(model.parameters())
    assert works[0] == works[1], works


def check_everything_in_a_reentrant_checkpoint() -> None:
    """Autograd has no callback for the outermost backward then: ``step()`` averages."""
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        inputs, targets = whole_batch(step)
        optimizer.zero_grad()
        outputs = checkpoint(model, part(inputs).requires_grad_(), use_reentrant=True)
        torch.nn.functional.mse_loss(outputs, part(targets)).backward()
        optimizer.step()
        take_step(reference, reference_optimizer, inputs, targets)
    assert_close(model, reference)


def check_checkpoint_that_appears_later() -> None:
    """A parameter first outside, then in a reentrant checkpoint as well: refused, not silently
    wrong."""
    torch.manual_seed(2)
    layer = torch.nn.Linear(3, 3).double()
    optimizer = wrap(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    inputs = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(2):
        layer(layer(inputs)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = layer(checkpoint(layer, inputs.requires_grad_(), use_reentrant=True)).sum()
    with expect(ringdl.UsageError, "use_reentrant=False"):
        loss.backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    layer(checkpoint(layer, inputs, use_reentrant=True)).sum().backward()
    optimizer.step()
    assert_same_bits(layer.parameters())


def check_gan() -> None:
    def run(is_split: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
        torch.manual_seed(4)
        generator = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
        ).double()
        critic = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        ).double()
        optimizers = [OPTIMIZERS["adamw"](module.parameters()) for module in (generator, critic)]
        if is_split:
            for optimizer, module in zip(optimizers, (generator, critic), strict=True):
                wrap(optimizer, module)
        for step in range(4):
            noise, real = (part(tensor) if is_split else tensor for tensor in whole_batch(step))
            optimizers[1].zero_grad()
            (critic(generator(noise).detach()).mean() - torch.tanh(critic(real)).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-critic(generator(noise)).mean()).backward()  # also adds to the critic's gradients
            optimizers[0].step()
        return generator, critic

    for module, reference in zip(run(True), run(False), strict=True):
        assert_close(module, reference)
        assert_same_bits(module.parameters())


def check_gan_where_some_ranks_have_no_backward() -> None:
    """A generator step averages the critic's gradients; then a rank skips the critic's backward."""

    def run(is_split: bool) -> torch.nn.Module:
        generator, critic = make_mlp(1), torch.nn.Linear(3, 1).double()
        torch.nn.init.constant_(critic.weight, 0.25)
        torch.nn.init.constant_(critic.bias, 0.5)
        optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in (generator, critic)]
        if is_split:
            for optimizer, module in zip(optimizers, (generator, critic), strict=True):
                wrap(optimizer, module)
        for step in range(3):
            noise = whole_batch(step)[0]
            noise = part(noise) if is_split else noise
            optimizers[0].zero_grad()
            critic(torch.tanh(generator(noise))).mean().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            if not is_split or ringdl.rank() == 0:
                scale = 1 if is_split else ringdl.size()
                (critic(whole_batch(step)[1]).pow(2).mean() / scale).backward()
            optimizers[1].step()
        return torch.nn.ModuleList([generator, critic])

    model = run(True)
    assert_close(model, run(False))
    assert_same_bits(model.parameters())


def check_retained_graph_and_double_backward() -> None:
    def run(is_split: bool) -> torch.nn.Module:
        model = make_mlp()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if is_split:
            wrap(optimizer, model)
        for step in range(3):
            inputs, targets = (part(tensor) if is_split else tensor for tensor in whole_batch(step))
            optimizer.zero_grad()
            inputs = inputs.requires_grad_()
            loss = loss_of(model, inputs, targets)
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            loss.backward(retain_graph=True)
            # Scaled so that the mean over the ranks is the whole batch's.
            (slope * len(inputs)).pow(2).sum(1).mean().backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        return model

    assert_close(run(True), run(False))


def check_create_graph() -> None:
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(2):
        inputs, targets = whole_batch(step)
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of the reference cycle
                loss_of(model, part(inputs), part(targets)).backward(create_graph=True)
            loss_of(reference, inputs, targets).backward()
        optimizer.step()
        reference_optimizer.step()
    for parameter in model.parameters():
        assert not parameter.grad.requires_grad
    assert_close(model, reference)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, slopes):
        raise ArithmeticError("a backward that fails")


def check_failed_backward() -> None:
    """All ranks stay in step with each other: one failed pass, its gradients averaged, then as if
    nothing had been."""
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(5):
        inputs, targets = whole_batch(step)
        if step == 2:
            optimizer.zero_grad()
            hidden = model[:2](part(inputs))
            last_rank = ringdl.rank() == ringdl.size() - 1
            loss = torch.nn.functional.mse_loss(
                model[2:](_Fails.apply(hidden) if last_rank else hidden), part(targets)
            )
            if last_rank:
                with expect(ArithmeticError, "fails"):
                    loss.backward()
            else:
                loss.backward()
            optimizer.synchronize()
            assert_same_bits(
                [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            )
            continue
        take_step(model, optimizer, part(inputs), part(targets))
        take_step(reference, reference_optimizer, inputs, targets)
    assert_close(model, reference)
    assert_same_bits(model.parameters())


def check_backward_after_a_failed_one() -> None:
    """The round that a failed backward has begun is ended by the next backward."""
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(4):
        inputs, targets = whole_batch(step)
        optimizer.zero_grad()
        if step == 2:
            loss = model[2:](_Fails.apply(model[:2](part(inputs)))).sum()
            with expect(ArithmeticError, "fails"):
                loss.backward()
            optimizer.zero_grad()
        loss_of(model, part(inputs), part(targets)).backward()
        optimizer.step()
        take_step(reference, reference_optimizer, inputs, targets)
    assert_close(model, reference)


def check_zeroing_after_a_failed_backward() -> None:
    """In place, while what it has begun is in flight."""
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(4):
        inputs, targets = whole_batch(step)
        optimizer.zero_grad(set_to_none=False)
        if step == 2:
            if ringdl.rank() == ringdl.size() - 1:
                time.sleep(0.2)
            loss = model[2:](_Fails.apply(model[:2](part(inputs)))).sum()
            with expect(ArithmeticError, "fails"):
                loss.backward()
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, part(inputs), part(targets)).backward()
        optimizer.step()
        take_step(reference, reference_optimizer, inputs, targets)
    assert_close(model, reference)


def check_hooks_that_change_gradients() -> None:
    """Each rank's own, before they are averaged, also those of after the optimizer was wrapped."""

    def clamp(its: torch.Tensor) -> None:
        its.grad.clamp_(max=2.5)

    layers = [torch.nn.Parameter(torch.zeros(100_000)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, lr=0.0))
    for each in layers:
        each.register_post_accumulate_grad_hook(clamp)
    mean = sum(min(rank + 1, 2.5) for rank in range(ringdl.size())) / ringdl.size()
    for _ in range(4):
        optimizer.zero_grad()
        sum(each.sum() * (ringdl.rank() + 1) for each in layers).backward()
        for each in layers:
            torch.testing.assert_close(each.grad, torch.full_like(each, mean))
        optimizer.step()


def check_gradient_made_elsewhere() -> None:
    """Gradients that the script assigned itself are averaged in ``step()``."""
    layer = torch.nn.Linear(2, 2).double()
    hvd.broadcast_parameters(layer.state_dict())
    before = layer.weight.detach().clone()
    optimizer = wrap(torch.optim.SGD(layer.parameters(), lr=1), layer)
    layer.weight.grad = torch.full((2, 2), float(ringdl.rank()), dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(
        before - layer.weight, torch.full_like(before, (ringdl.size() - 1) / 2)
    )
    assert layer.bias.grad is None

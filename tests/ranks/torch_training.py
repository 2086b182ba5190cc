"""Training on P ranks with split batches is training on one process with whole batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import ringdl
import ringdl.torch as hvd
from ringdl.torch import _unwrapped
from tests.ranks.torch_helpers import (
    OPTIMIZERS,
    MakeOptimizer,
    assert_close,
    assert_same_bits,
    bits,
    loss_of,
    make_mlp,
    part,
    take_step,
    whole_batch,
    wrap,
)


class Branching(torch.nn.Module):
    """A layer used by rows whose first input is large, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = torch.nn.Linear(6, 3)
        self.extra = torch.nn.Linear(6, 3)
        self.unused = torch.nn.Linear(4, 4)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.base(inputs)
        rows = (inputs[:, 0] > 100).nonzero()[:, 0]
        return outputs.index_add(0, rows, self.extra(inputs[rows])) if len(rows) else outputs


def branching_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every third step no row uses the extra layer, then the first three rows, then all."""
    inputs, targets = whole_batch(step)
    inputs[: (0, 3, len(inputs))[step % 3], 0] = 101
    return inputs, targets


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    is_split: bool,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = whole_batch,
    *,
    set_to_none: bool = True,
    zero_by_model: bool = False,
    clip_norm: float | None = None,
    steps: int = 7,
) -> None:
    for step in range(steps):
        inputs, targets = (part(tensor) if is_split else tensor for tensor in batch(step))
        if zero_by_model:
            model.zero_grad(set_to_none=set_to_none)
        else:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, inputs, targets).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()


def compare(
    make_model: Callable[[], torch.nn.Module], make_optimizer: MakeOptimizer, **options
) -> None:
    model, reference = make_model(), make_model()
    train(model, wrap(make_optimizer(model.parameters()), model), True, **options)
    train(reference, make_optimizer(reference.parameters()), False, **options)
    assert_close(model, reference)
    assert_same_bits(model.parameters())


def check_optimizers_and_zero_grad_modes() -> None:
    for make_optimizer in OPTIMIZERS.values():
        for set_to_none in (True, False):
            for zero_by_model in (True, False):
                compare(
                    make_mlp, make_optimizer, set_to_none=set_to_none, zero_by_model=zero_by_model
                )


def check_unused_layers() -> None:
    for make_optimizer in OPTIMIZERS.values():
        for set_to_none in (True, False):
            compare(Branching, make_optimizer, batch=branching_batch, set_to_none=set_to_none)


def check_clipping_after_backward() -> None:
    compare(make_mlp, OPTIMIZERS["momentum"], clip_norm=0.05)


def check_same_bits_from_run_to_run() -> None:
    digests = set()
    for _ in range(3):
        model = make_mlp()
        train(model, wrap(OPTIMIZERS["adamw"](model.parameters()), model), True)
        digests.add(bits(model.parameters()))
    assert len(digests) == 1


def check_param_groups_and_scheduler_made_before() -> None:
    def run(is_split: bool) -> torch.nn.Module:
        model = make_mlp()
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}],
            lr=0.01,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        if is_split:
            optimizer = wrap(optimizer, model)
        for step in range(6):
            inputs, targets = (part(tensor) if is_split else tensor for tensor in whole_batch(step))
            take_step(model, optimizer, inputs, targets)
            scheduler.step()
        return model

    model = run(True)
    assert_close(model, run(False))
    assert_same_bits(model.parameters())


def check_scheduler_made_before_joins_without_backward() -> None:
    """The scheduler's ``step`` on the instance must not hide the joining."""
    model, reference = make_mlp(), make_mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    wrap(optimizer, model)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(4):
        inputs, targets = whole_batch(step)
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        if ringdl.rank() == step % ringdl.size():
            loss_of(model, inputs, targets).backward()
        optimizer.step()
        (loss_of(reference, inputs, targets) / ringdl.size()).backward()
        reference_optimizer.step()
    assert_close(model, reference)


def check_no_backward_on_any_rank() -> None:
    model, reference = make_mlp(), make_mlp()
    optimizer = wrap(OPTIMIZERS["adamw"](model.parameters()), model)
    for _ in range(2):
        optimizer.step()
    assert_close(model, reference)


def check_tied_weights() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first = torch.nn.Linear(6, 3)
            self.last = torch.nn.Linear(6, 3)
            self.last.weight = self.first.weight
            self.double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(inputs)) @ self.first.weight)

    compare(Tied, OPTIMIZERS["momentum"])


def check_channels_last() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(6)
        model = torch.nn.Sequential(
            torch.nn.Unflatten(1, (2, 3, 1)),
            torch.nn.Conv2d(2, 4, (2, 1), padding=1),
            torch.nn.Tanh(),
            torch.nn.Conv2d(4, 5, 3, padding=1),
            torch.nn.Flatten(),
            torch.nn.LazyLinear(3),
        ).double()
        model(torch.zeros(1, 6, dtype=torch.float64))
        return model.to(memory_format=torch.channels_last)

    compare(make, OPTIMIZERS["momentum"])
    model = make()
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    train(model, optimizer, True, steps=1)
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()


def check_bf16_parameters() -> None:
    model = make_mlp().bfloat16()
    reference = make_mlp().bfloat16().double()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    batch = [tensor.bfloat16() for tensor in whole_batch(0)]
    loss_of(model, *map(part, batch)).backward()
    loss_of(reference, *(tensor.double() for tensor in batch)).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.grad.double(), expected.grad, rtol=0.05, atol=0.02)
    optimizer.step()
    assert_same_bits(model.parameters())


def check_mixed_dtypes_and_sum() -> None:
    model = torch.nn.ParameterDict(
        {
            "f16": torch.zeros(5, dtype=torch.float16),
            "f32": torch.zeros(3, 2),
            "f64": torch.zeros((), dtype=torch.float64),
            "bf16": torch.zeros(2, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
        }
    )
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1), model, op=ringdl.Sum)
    sum((ringdl.rank() + 1) * value.double().sum() for value in model.values()).backward()
    total = ringdl.size() * (ringdl.size() + 1) / 2
    for parameter in model.values():
        assert torch.equal(parameter.grad, torch.full_like(parameter, total))
    optimizer.step()
    assert_same_bits(model.parameters())


def check_layers_of_different_dtypes() -> None:
    """Each dtype has buckets of its own; float64 weights stay exact beside bfloat16 ones."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(12)
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(6, 6).to(dtype)
                for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return sum(layer(inputs.to(layer.weight.dtype)).double() for layer in self.layers)

    def train_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, is_split: bool) -> None:
        for step in range(3):
            inputs = whole_batch(step)[0]
            optimizer.zero_grad()
            outputs = model(part(inputs) if is_split else inputs)
            outputs.sum(1).mean().backward()
            optimizer.step()

    model, reference = Mixed(), Mixed()
    train_on(model, wrap(OPTIMIZERS["momentum"](model.parameters()), model), True)
    train_on(reference, OPTIMIZERS["momentum"](reference.parameters()), False)
    tolerances = (1e-12, 1e-6, 5e-3, 4e-2)
    for layer, expected, tolerance in zip(model.layers, reference.layers, tolerances, strict=True):
        assert layer.weight.grad.dtype == layer.weight.dtype
        torch.testing.assert_close(layer.weight, expected.weight, rtol=tolerance, atol=tolerance)
    assert_same_bits(model.parameters())


def check_steps_without_a_backward() -> None:
    """The gradients stay what they are, whether they were averaged or summed."""
    rank, size = ringdl.rank(), ringdl.size()
    for op, factor in ((ringdl.Average, 1 / size), (ringdl.Sum, 1.0)):
        layer = torch.nn.Linear(3, 2, bias=False).double()
        table = torch.nn.Embedding(4, 2, sparse=True).double()
        model = torch.nn.ModuleList([layer, table])
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, op=op)
        for _ in range(2):
            optimizer.zero_grad()
            loss = layer(torch.full((1, 3), rank + 1.0).double()).sum()
            (loss + (rank + 1) * table(torch.tensor([rank % 4])).sum()).backward()
            optimizer.step()
            expected = [parameter.grad.clone() for parameter in model.parameters()]
            assert (expected[0] == factor * size * (size + 1) / 2).all()
            optimizer.step()
            optimizer.step(lambda: torch.zeros(()))
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                dense = [each.to_dense() for each in (parameter.grad, gradient)]
                assert torch.allclose(*dense, rtol=1e-15, atol=0)


class Replacing(torch.optim.SGD):
    """Gives its gradients other memory, as clipping by ``grad.data = ...`` does."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.data = parameter.grad.data.clone()
        return result

    def zero_grad(self, *, set_to_none: bool = True) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=set_to_none)


def check_gradients_in_other_memory() -> None:
    """They move back into the buckets; a step within a step counts once."""
    if ringdl.rank() == 0:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)  # torch looks at its step, too
    for set_to_none in (True, False):
        compare(
            make_mlp,
            lambda parameters: Replacing(parameters, lr=0.1, momentum=0.9),
            set_to_none=set_to_none,
        )


class Widened(torch.autograd.Function):
    """As float32, and so is the gradient."""

    @staticmethod
    def forward(ctx: object, narrow: torch.Tensor) -> torch.Tensor:
        del ctx
        return narrow.float()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        del ctx
        return gradient


def check_gradients_of_another_dtype() -> None:
    """Of float32, for parameters of bfloat16: they are averaged as such."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    model = torch.nn.Linear(64, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad_dtype = torch.float32
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    gradient = torch.full((1, 64), 1.0 + 2**-12 * ringdl.rank())
    (Widened.apply(model.weight) * gradient).sum().backward()
    expected = 1.0 + 2**-12 * (ringdl.size() - 1) / 2
    assert model.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model.weight.grad, torch.full((1, 64), expected))
    optimizer.zero_grad()


def check_backward_passes_in_threads() -> None:
    """Of two models at once."""
    models = [make_mlp(), make_mlp()]
    reference = make_mlp()
    optimizers = [wrap(torch.optim.SGD(each.parameters(), lr=0.1), each) for each in models]
    pairs = zip(models, optimizers, strict=True)
    device = torch.get_default_device()  # of this thread
    with ThreadPoolExecutor(2, initializer=torch.set_default_device, initargs=(device,)) as pool:
        list(pool.map(lambda pair: train(*pair, True, clip_norm=0.05, steps=20), pairs))
    train(
        reference, torch.optim.SGD(reference.parameters(), lr=0.1), False, clip_norm=0.05, steps=20
    )
    for model in models:
        assert_close(model, reference)
        assert_same_bits(model.parameters())
    ringdl.get_communicator()._engine.forget_submitters()  # later checks have one thread


def check_what_is_broadcast_again_and_again() -> None:
    """It is remembered once."""
    layer = torch.nn.Linear(3, 2)
    hvd.broadcast_parameters(layer.state_dict(), 0)
    before = len(_unwrapped._replicated)
    for _ in range(3):
        hvd.broadcast_parameters(layer.state_dict(), 0)
    assert len(_unwrapped._replicated) == before


def check_a_rate_that_groups_share() -> None:
    """A tensor."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in weights], lr=torch.tensor(0.1))
    scheduler = hvd.scale_with_warm_up(optimizer, 4, factor=3.0)
    for group in optimizer.param_groups:
        assert abs(float(group["lr"]) - 0.1) < 1e-6
        assert abs(float(group["initial_lr"]) - 0.3) < 1e-6
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert all(abs(float(group["lr"]) - 0.3) < 1e-6 for group in optimizer.param_groups)

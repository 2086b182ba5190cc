"""Broadcasts of parameters and optimizer state, frozen parameters, replicas that differ, wrong
usage on all ranks."""

from __future__ import annotations

import io

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import (
    OPTIMIZERS,
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


def _step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, is_split: bool = True
) -> None:
    inputs, targets = (part(tensor) if is_split else tensor for tensor in whole_batch(step))
    take_step(model, optimizer, inputs, targets)


def check_broadcast_parameters() -> None:
    root = ringdl.size() - 1

    def make(value: int) -> dict[str, torch.Tensor]:
        state = {
            "single": torch.full((3, 4), value / 4),
            "strided": torch.full((4, 6), value, dtype=torch.float64)[1:3, ::2],
            "transposed": torch.arange(6.0).reshape(2, 3).t() * value,
            "channels_last": torch.full((2, 3, 4, 5), float(value)).to(
                memory_format=torch.channels_last
            ),
            "brain": torch.full((5,), value, dtype=torch.bfloat16),
            "half": torch.full((5,), value, dtype=torch.float16),
            "scalar": torch.tensor(value),
            "flags": torch.tensor([value % 2 == 0, True, value % 2 == 1]),
            "bytes": torch.full((7,), value, dtype=torch.uint8),
            "complex": torch.full((2,), complex(value, -value)),
            "empty": torch.zeros(0, 3),
        }
        return state | {"parameter": torch.nn.Parameter(torch.full((2,), float(value)))}

    state = make(ringdl.rank() + 7)
    addresses = [tensor.data_ptr() for tensor in state.values()]
    hvd.broadcast_parameters(state, root_rank=root)
    for name, expected in make(root + 7).items():
        assert torch.equal(state[name], expected), name
    assert addresses == [tensor.data_ptr() for tensor in state.values()]


@needs(ranks=2)
def check_small_tensors_are_broadcast_together() -> None:
    """A hundred layers cost about as many calls as one; the bits are the root's all the same."""

    def make(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        dtypes = (torch.float32, torch.int8, torch.float64, torch.bool, torch.bfloat16)
        return {
            f"layer {i}": (torch.rand(3 + i % 7, 5, generator=random) * 9).to(dtypes[i % 5])
            for i in range(100)
        } | {"wide": torch.rand(600, 600, generator=random)}

    state, expected = make(ringdl.rank()), make(0)
    before = ringdl.stats()["works"]
    hvd.broadcast_parameters(state)
    assert ringdl.stats()["works"] - before <= 5
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def check_broadcast_parameters_of_a_model() -> None:
    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
        model(torch.randn(5, 6))
        return model

    for view in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: model.parameters(),
    ):
        model = make(ringdl.rank())
        hvd.broadcast_parameters(view(model), root_rank=0)
        assert_same_bits(model.parameters())
    model = make(ringdl.rank())
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert bits(model.state_dict().values()) == bits(make(0).state_dict().values())


@needs(ranks=2)
def check_broadcast_parameters_that_differ_in_shape() -> None:
    state = {
        "a": torch.full((2,), float(ringdl.rank())),
        "b": torch.zeros(2 + (ringdl.rank() == 1)),
    }
    text = "'b' is float32[3] on rank 1, but float32[2] on the root rank"
    with expect(ringdl.MismatchError, text):
        hvd.broadcast_parameters(state, 0)
    assert state["a"][0] == ringdl.rank()
    ringdl.barrier()


def check_broadcast_optimizer_state() -> None:
    makers = OPTIMIZERS | {
        "adam_lr_tensor": lambda parameters: torch.optim.Adam(
            parameters, lr=torch.tensor(0.01), amsgrad=True
        ),
        "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5, centered=True),
        "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
        "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
        "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
    }
    for is_wrapped in (False, True):
        for name, make_optimizer in makers.items():
            model = make_mlp()
            optimizer = make_optimizer(model.parameters())
            if ringdl.rank() == 0:  # only the root has trained
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 2
                for step in range(2):

                    def closure(step=step, model=model, optimizer=optimizer):
                        optimizer.zero_grad()
                        loss = loss_of(model, *whole_batch(step))
                        loss.backward()
                        return loss

                    optimizer.step(closure)
            if is_wrapped:
                wrap(optimizer, model)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            texts = ringdl.broadcast_object(_text(optimizer.state_dict()))
            assert _text(optimizer.state_dict()) == texts, name


def _text(state_dict: dict) -> str:
    torch.set_printoptions(precision=17, threshold=10**6)
    return repr(state_dict)


def check_broadcast_optimizer_state_keeps_dtypes() -> None:
    """A state of more precision than its parameter is not rounded on its way."""
    layer = torch.nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    if ringdl.rank() == 0:
        optimizer.state[layer.weight]["momentum_buffer"] = torch.full((2, 2), 1 / 3)
    hvd.broadcast_optimizer_state(optimizer)
    assert torch.equal(optimizer.state[layer.weight]["momentum_buffer"], torch.full((2, 2), 1 / 3))


def check_resume_from_the_roots_checkpoint() -> None:
    reference = make_mlp()
    reference_optimizer = OPTIMIZERS["adamw"](reference.parameters())
    for step in range(6):
        _step(reference, reference_optimizer, step, is_split=False)

    model = make_mlp()
    optimizer = wrap(OPTIMIZERS["adamw"](model.parameters()), model)
    for step in range(3):
        _step(model, optimizer, step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    model = make_mlp(seed=20 + ringdl.rank())
    optimizer = wrap(OPTIMIZERS["adamw"](model.parameters()), model)
    if ringdl.rank() == 0:
        file.seek(0)
        loaded = torch.load(file)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(3, 6):
        _step(model, optimizer, step)
    assert_close(model, reference)
    assert_same_bits(model.parameters())


@needs(ranks=2)
def check_replicas_that_differ() -> None:
    model = make_mlp()
    if ringdl.rank() == 1:
        with torch.no_grad():
            model[2].bias[3] += 1e-9
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    before = bits(model.parameters())
    loss_of(model, *map(part, whole_batch(0))).backward()
    with expect(
        ringdl.MismatchError,
        "'2.bias'",
        "rank 1 has",
        "broadcast_parameters",
        "RINGDL_CHECK_REPLICAS=0",
        "check_replicas=False",
    ):
        optimizer.step()
    assert bits(model.parameters()) == before
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.step()
    assert_same_bits(model.parameters())


@needs(ranks=2)
def check_replicas_that_are_meant_to_differ() -> None:
    for how in ("an argument", "the setting"):
        model = make_mlp(seed=ringdl.rank())
        shared = ringdl.get_communicator()._shared
        for op in (hvd.Average, hvd.Adasum):
            options = {"check_replicas": False} if how == "an argument" else {}
            optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model, op=op, **options)
            shared.checks_replicas = how == "an argument"
            loss_of(model, *map(part, whole_batch(0))).backward()
            optimizer.step()
            shared.checks_replicas = True


def check_frozen_parameters() -> None:
    def run(is_split: bool) -> torch.nn.Module:
        model = make_mlp()
        model[0].requires_grad_(False)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if is_split:
            wrap(optimizer, model)
        for step in range(4):
            if step == 2:
                model[2].weight.requires_grad_(False)
            _step(model, optimizer, step, is_split)
        return model

    assert_close(run(True), run(False))


def check_unfrozen_later() -> None:
    model = make_mlp()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(OPTIMIZERS["sgd"](model.parameters()), model)
    _step(model, optimizer, 0)
    model[0].weight.requires_grad_(True)
    with expect(ringdl.UsageError, "'0.weight'"):
        _step(model, optimizer, 1)
    model[0].weight.grad = None
    optimizer.step()


@needs(ranks=2)
def check_models_that_differ() -> None:
    model = torch.nn.Linear(2, 2 + (ringdl.rank() == 1))
    with expect(ringdl.MismatchError, "('weight') is [2, 2] on", "rank 1"):
        wrap(torch.optim.SGD(model.parameters()), model)


def check_tensors_that_cannot_be_broadcast() -> None:
    """Told to all ranks, also if one alone has them."""
    last = ringdl.size() - 1
    pair = [("weight", torch.zeros(2)), ("weight", torch.ones(2))]
    with expect(ringdl.MismatchError, "two tensors are called 'weight'"):
        hvd.broadcast_parameters(pair)
    with expect(ringdl.MismatchError, "'sparse' is sparse; leave it out"):
        hvd.broadcast_parameters({"sparse": torch.eye(2).to_sparse()})
    wide = torch.zeros(1, 3).expand(2, 3) if ringdl.rank() == last else torch.zeros(2, 3)
    with expect(ringdl.MismatchError, "elements of 'wide' share memory", f"rank {last}"):
        hvd.broadcast_parameters({"wide": wide})

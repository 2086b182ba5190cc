"""What the torch checks share: models, batches split over the ranks, and the same training on one
process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

import ringdl
import ringdl.torch as hvd

torch.set_num_threads(1)

ROWS = 24
"""Rows of a whole batch; every number of ranks up to 4 divides it."""

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def make_mlp(seed: int = 1) -> torch.nn.Sequential:
    """A small float64 model; the same on every rank."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 10),
        torch.nn.Tanh(),
        torch.nn.Linear(10, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 3),
    ).double()


def whole_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (ROWS, 6) and targets (ROWS, 3)."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)


def part(tensor: torch.Tensor, index: int | None = None, count: int | None = None) -> torch.Tensor:
    """Part ``index`` of ``count`` equal ones along axis 0; by default this rank's."""
    count = ringdl.size() if count is None else count
    index = ringdl.rank() if index is None else index
    return tensor.chunk(count)[index]


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return torch.nn.functional.mse_loss(model(inputs), targets)


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    set_to_none: bool = True,
) -> None:
    """One step of training."""
    optimizer.zero_grad(set_to_none)
    loss_of(model, inputs, targets).backward()
    optimizer.step()


def wrap(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, **options: object
) -> torch.optim.Optimizer:
    """DistributedOptimizer with the model's names."""
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def assert_close(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Parameters and buffers agree to 1e-10, and so does which gradients exist."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        torch.testing.assert_close(
            parameter,
            expected,
            rtol=1e-10,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        assert (parameter.grad is None) == (expected.grad is None), f"gradient of {name}"


def assert_same_bits(tensors: Iterable[torch.Tensor]) -> None:
    """All ranks hold the same bits."""
    digest = bits(tensors)
    gathered = ringdl.allgather(np.frombuffer(digest, np.uint8)[None].copy())
    assert (gathered == gathered[0]).all(), "ranks hold other bits"


def bits(tensors: Iterable[torch.Tensor]) -> bytes:
    """A digest of the tensors' bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        )
    return digest.digest()

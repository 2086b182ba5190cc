"""What is learnt: tasks that need no download."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A network, data, and how it is trained in one process.

    Args:
        network: makes it.
        optimizer: makes its optimizer, of parameters and a learning rate.
        data: the data: inputs and targets to train with, and others to test with.
        rate: a learning rate that is about right for one rank.
        batch: samples of a step, over all ranks.
        steps: of a run with gradients averaged in each.
    """

    network: Callable[[], nn.Module]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    data: Callable[[], tuple[Tensors, Tensors]]
    rate: float
    batch: int
    steps: int


def _digits(is_shifted: bool) -> tuple[Tensors, Tensors]:
    """scikit-learn's, of 8 x 8; every fifth is for the test. Shifted ones are moved by a pixel."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    is_test = torch.arange(len(y)) % 5 == 4
    train, test = (x[~is_test], y[~is_test]), (x[is_test], y[is_test])
    if is_shifted:
        moves = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
        shifted = torch.cat([train[0].roll(move, (2, 3)) for move in moves])
        train = shifted, train[1].repeat(len(moves))
    return train, test


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


_CONTEXT, _WIDTH, _CHARACTERS = 32, 64, 128


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.output = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.query_key_value(self.before(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return y


class _Gpt(nn.Module):
    """Two layers; characters in, logits of the next ones out: (rows, characters, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(_CHARACTERS, _WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(_CONTEXT, _WIDTH))
        self.layers = nn.Sequential(_Layer(), _Layer())
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _CHARACTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places
        logits: torch.Tensor = self.head(self.layers(x))
        return logits.transpose(1, 2)


def _library() -> tuple[Tensors, Tensors]:
    """Python's own standard library, as rows of characters; every tenth file is for the test."""
    texts: tuple[list[bytes], list[bytes]] = [], []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for number, path in enumerate(sorted(folder.glob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        texts[number % 10 == 9].append(text.encode("ascii", errors="replace"))
    parts = []
    for its, most in zip(texts, (20_000, 256), strict=True):
        whole = np.frombuffer(b"\n".join(its), np.uint8)
        rows = len(whole) // (_CONTEXT + 1)
        kept = whole[: rows * (_CONTEXT + 1)].reshape(rows, -1)
        chosen = torch.tensor(kept[:: max(1, rows // most)][:most].astype(np.int64))
        parts.append((chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()))
    return parts[0], parts[1]


def _sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate, momentum=0.9)


def _adam(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, rate)


TASKS = {
    "digits": Task(_mlp, _sgd, lambda: _digits(False), 0.05, 64, 320),
    "shifted-digits": Task(_convolutional, _sgd, lambda: _digits(True), 0.05, 64, 320),
    "gpt": Task(_Gpt, _adam, _library, 0.003, 32, 256),
}

"""Data that every script trains on: made from its seed, or from what Python brings along."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringdl.torch as hvd

torch.set_default_dtype(torch.float64)
BATCH = 24
"""Rows of a whole batch."""


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def classes(rows: int, features: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around one center per class, and their classes."""
    points, centers = tensors((rows, features), (count, features), seed=1)
    labels = torch.arange(rows) * 7 % count
    return points + centers[labels], labels


def text() -> torch.Tensor:
    """ASCII characters of a module of the standard library."""
    return torch.tensor([min(ord(c), 127) for c in Path(textwrap.__file__).read_text()])


def batches(*data: torch.Tensor) -> DataLoader:
    """This rank's part of each whole batch, as scripts usually get it."""
    dataset = TensorDataset(*data)
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), shuffle=False)
    return DataLoader(dataset, BATCH // hvd.size(), sampler=sampler)

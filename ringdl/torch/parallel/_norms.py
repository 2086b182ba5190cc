"""Norms of sequences that are cut over ranks (Korthikanti and others 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ringdl import Communicator
from ringdl.torch.parallel._exchanges import copy


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """A layer norm of this rank's part of a sequence; all ranks have the same weight and bias.

    Args:
        arguments: those of ``torch.nn.LayerNorm``; so are the options.
        communicator: the ranks, as ``grid.model``.
    """

    def __init__(self, *arguments: Any, communicator: Communicator, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm; gradients of weight and bias are added up over ranks."""
        weight, bias = (
            None if each is None else copy(each, self.communicator)
            for each in (self.weight, self.bias)
        )
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """The same of the root mean square, without a bias.

    Args:
        arguments: those of ``torch.nn.RMSNorm``; so are the options.
        communicator: the ranks, as ``grid.model``.
    """

    def __init__(self, *arguments: Any, communicator: Communicator, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm; the weight's gradient is added up over ranks."""
        weight = None if self.weight is None else copy(self.weight, self.communicator)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)

"""The two blocks of a transformer's layer, each with two exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import ringdl
from ringdl import Communicator
from ringdl.torch.parallel._linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(torch.nn.Module):
    """Two linear layers; each rank has some of the units between them.

    Args:
        features: of inputs and outputs.
        inner: units between.
        communicator: the ranks, as ``grid.model``.
        activation: applied between; without parameters.
        bias: whether the layers have one.
        sequence_dim: if given, inputs and outputs are cut along this dimension.
        options: ``device`` and ``dtype``.

    Raises:
        UsageError: the activation has parameters.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        communicator: Communicator,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu,
        bias: bool = True,
        sequence_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(activation, torch.nn.Module) and any(True for _ in activation.parameters()):
            raise ringdl.UsageError(
                "an activation with parameters sees this rank's units alone, and so do their "
                "gradients; make the layers by yourself, and use parallel.copy of its parameters"
            )
        its: dict[str, Any] = {"communicator": communicator, "sequence_dim": sequence_dim}
        self.up = ColumnParallelLinear(features, inner, bias, **its, **options)
        self.activation = activation
        self.down = RowParallelLinear(inner, features, bias, **its, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (..., features)."""
        y: torch.Tensor = self.down(self.activation(self.up(x)))
        return y


class ParallelAttention(torch.nn.Module):
    """Self-attention; each rank has some of the heads.

    Args:
        features: of inputs and outputs.
        heads: all ranks' together.
        communicator: the ranks, as ``grid.model``.
        is_causal: whether a place sees those before it alone.
        bias: whether the layers have one.
        dropout: of attention, in training. Ranks draw by themselves.
        sequence_dim: 1 if inputs and outputs are cut along the sequence.
        options: ``device`` and ``dtype``.

    Raises:
        UsageError: features are not a multiple of heads, or heads not one of ranks.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        communicator: Communicator,
        is_causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        sequence_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if heads < 1 or features % heads != 0 or heads % communicator.size != 0:
            raise ringdl.UsageError(
                f"{features} features of {heads} heads on {communicator.size} ranks: heads have to "
                "divide features, and ranks heads"
            )
        self.heads, self.head_size = heads // communicator.size, features // heads
        self.is_causal, self.dropout = is_causal, dropout
        its: dict[str, Any] = {"communicator": communicator, "sequence_dim": sequence_dim}
        self.query_key_value = ColumnParallelLinear(
            features, 3 * features, bias, sections=3, **its, **options
        )
        self.output = RowParallelLinear(features, features, bias, **its, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, sequence, features)."""
        query, key, value = (
            each.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2)
            for each in self.query_key_value(x).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.is_causal
        )
        z: torch.Tensor = self.output(y.transpose(1, 2).flatten(-2))
        return z

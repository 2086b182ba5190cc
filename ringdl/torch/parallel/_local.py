"""Locally connected layers whose images are cut into regions, one on each rank.

As the first systems that cut networks over machines did (Dean and others 2012): each place of the
image has weights of its own, so most of a layer's input is where its weights are, and only what
lies at the regions' borders travels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

import ringdl
from ringdl import Communicator
from ringdl._engine import Kind
from ringdl.torch.parallel._cuts import Cut, cut_parameter
from ringdl.torch.parallel._exchanges import exchanged, span

Rows = tuple[int, int]
"""From, and to."""


class LocallyConnected2d(torch.nn.Module):
    """Like a convolution, with weights of their own at each place; ranks have regions of rows.

    Args:
        in_channels: of an input.
        out_channels: of an output.
        image_size: height and width of inputs, all regions together.
        kernel_size: of a place's weights, in both directions.
        stride: from place to place, in both.
        bias: whether there is one, at each place.
        communicator: the ranks, as ``grid.model``.
        options: ``device`` and ``dtype``.

    Raises:
        UsageError: the image is smaller than the kernel, or the stride below 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        image_size: tuple[int, int],
        kernel_size: int,
        stride: int = 1,
        bias: bool = True,
        *,
        communicator: Communicator,
        **options: Any,
    ) -> None:
        super().__init__()
        if min(image_size) < kernel_size or kernel_size < 1:
            raise ringdl.UsageError(
                f"an image of {image_size} is smaller than its kernel, or this has no size"
            )
        if stride < 1:
            raise ringdl.UsageError(f"stride is {stride}; pass a number, at least 1")
        self.communicator = communicator
        self.image_size, self.kernel_size, self.stride = image_size, kernel_size, stride
        height, width = ((size - kernel_size) // stride + 1 for size in image_size)
        self.output_size = height, width
        """Height and width of outputs, all regions together."""
        fan_in = in_channels * kernel_size**2
        cut = Cut(communicator, 1, height)
        bound = 1 / math.sqrt(fan_in)
        weight = torch.empty(out_channels, height, width, fan_in, **options)
        self.weight = torch.nn.Parameter(weight.uniform_(-bound, bound))
        cut_parameter(self, "weight", cut)
        self.bias: torch.nn.Parameter | None = None
        if bias:
            its = torch.empty(out_channels, height, width, **options).uniform_(-bound, bound)
            self.bias = torch.nn.Parameter(its)
            cut_parameter(self, "bias", cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the output, from its rows of the input.

        Both are (batch, channels, rows, width). Where it has none, its loss has to use them, too.

        Raises:
            UsageError: the input has other rows; the other ranks get a MismatchError.
        """
        rows = span(self.image_size[0], self.communicator)[1]
        with self.communicator._telling(Kind.alltoall, None):
            if x.shape[2] != rows:
                raise ringdl.UsageError(
                    f"this rank's region has {rows} of the image's rows, and the input {x.shape[2]}"
                )
        needed = [self._needed(rank) for rank in range(self.communicator.size)]
        region = exchange_rows(x, self.image_size[0], needed, self.communicator)
        out_channels, height, width, _ = self.weight.shape
        if height == 0:  # its gradients are empty, and it takes part in the others' exchange
            none = region[:, :1, :, :width].expand(-1, out_channels, -1, -1)
            return none + sum(parameter.sum() for parameter in self.parameters())
        places = functional.unfold(region, self.kernel_size, stride=self.stride)
        patches = places.reshape(*places.shape[:2], height, width)
        y = torch.einsum("bkhw,ohwk->bohw", patches, self.weight)
        return y if self.bias is None else y + self.bias

    def _needed(self, rank: int) -> Rows:
        begin, count = span(self.output_size[0], self.communicator, rank)
        if count == 0:
            return 0, 0
        return begin * self.stride, (begin + count - 1) * self.stride + self.kernel_size


def exchange_rows(
    x: torch.Tensor, height: int, needed: list[Rows], communicator: Communicator
) -> torch.Tensor:
    """Those rows that this rank needs of an image whose rows are cut over ranks; differentiable.

    Args:
        x: this rank's rows (see `span`): (batch, channels, rows, width).
        height: all ranks' rows together.
        needed: from which row to which each rank needs; they may overlap.
        communicator: the ranks.
    """
    if communicator.size == 1:
        return x[:, :, slice(*needed[0])]
    held = []
    for rank in range(communicator.size):
        begin, count = span(height, communicator, rank)
        held.append((begin, begin + count))
    return exchanged(
        x,
        communicator,
        lambda x: _move(x, held, needed, communicator),
        lambda gradient: _move(gradient, needed, held, communicator),
    )


def _move(
    x: torch.Tensor, held: list[Rows], needed: list[Rows], communicator: Communicator
) -> torch.Tensor:
    """Rows from who holds them to who needs them; where several hold one, they are added up."""
    own = held[communicator.rank]
    parts = [x[:, :, _shift(_common(own, other), own)] for other in needed]
    rows = torch.cat([each.movedim(2, 0).flatten(1) for each in parts])
    got, counts = communicator.alltoall(rows.contiguous(), [each.shape[2] for each in parts])
    mine = needed[communicator.rank]
    batch, channels, _, width = x.shape
    result = x.new_zeros(batch, channels, mine[1] - mine[0], width)
    for other, block in zip(held, torch.split(got, [int(count) for count in counts]), strict=True):
        piece = block.reshape(len(block), batch, channels, width).movedim(0, 2)
        result[:, :, _shift(_common(other, mine), mine)] += piece
    return result


def _common(a: Rows, b: Rows) -> Rows:
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else (a[0], a[0])


def _shift(rows: Rows, origin: Rows) -> slice:
    """As counted from the first of others; empty ones are anywhere."""
    if rows[0] == rows[1]:
        return slice(0, 0)
    return slice(rows[0] - origin[0], rows[1] - origin[0])

"""What float32 travels as between hosts, under the names of MPI training scripts."""

from __future__ import annotations

from typing import Any

import torch

import ringdl
from ringdl._reductions import CompressionName
from ringdl._training.compression import AnyCompression, wire_of

_WIDE = (torch.float32, torch.float64)


class Compressor(str):
    """A dtype's name, for `ringdl`, which also narrows and widens tensors by hand."""

    __slots__ = ()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor narrowed, if it is wider, and what it was."""
        is_narrowed = self != "none" and tensor.dtype in _WIDE
        return tensor.to(getattr(torch, self)) if is_narrowed else tensor, tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """What `compress` narrowed, as wide as it was."""
        return tensor.to(ctx)


class Compression:
    """What ``compression`` may be."""

    none = Compressor("none")
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")


def wire_of_sum(
    compression: AnyCompression, op: Any, dtype: torch.dtype = torch.float32
) -> CompressionName | None:
    """The same where only sums and averages of float32 are narrowed, and the rest left as it is."""
    wire = wire_of(compression)
    return wire if op in (ringdl.Sum, ringdl.Average) and dtype == torch.float32 else None

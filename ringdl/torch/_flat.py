"""Tensors of any strides as flat contiguous ones, and results back in their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import ringdl

Finish = Callable[[], None]


def flattened(
    tensors: Sequence[torch.Tensor], op: ringdl.Reduction
) -> tuple[list[torch.Tensor], Finish]:
    """Contiguous real tensors to reduce in place of these, and what writes results back."""
    flat, finishes = [], []
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ringdl.UsageError(
                "sparse tensors cannot be reduced by the backend; use dense gradients, or "
                "ringdl.torch.DistributedOptimizer, which sums sparse ones"
            )
        if tensor.is_complex() and op not in (ringdl.Sum, ringdl.Average):
            raise ringdl.UsageError(f"complex tensors have no {op}; take ReduceOp.SUM or AVG")
        own = _plain(tensor)
        flat.append(torch.view_as_real(own).reshape(-1, 2) if own.is_complex() else own.reshape(-1))
        if own.data_ptr() != tensor.data_ptr():
            finishes.append(functools.partial(fill, tensor, flat[-1]))
    return flat, in_turn(finishes)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, without lazy conjugation or negation; the same memory if it is so already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish]:
    """The bytes of a tensor, and what copies them back if they are a copy."""
    own = _plain(tensor)
    flat = own.reshape(-1).view(torch.uint8)
    if own.data_ptr() == tensor.data_ptr():
        return flat, nothing
    return flat, functools.partial(fill, tensor, flat)


def fill(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy bytes, or elements, into a tensor of any strides."""
    values = flat.reshape(-1)
    if values.dtype == torch.uint8 and tensor.dtype != torch.uint8:
        values = values.view(tensor.dtype)
    elif tensor.is_complex():
        values = torch.view_as_complex(flat.reshape(-1, 2))
    if values.numel() != tensor.numel():
        raise ringdl.UsageError(
            f"{values.numel()} elements have come, for a tensor of shape {tuple(tensor.shape)}; "
            "ranks have to pass tensors of the lengths that the others expect"
        )
    tensor.detach().copy_(values.reshape(tensor.shape))


def deal(gathered: torch.Tensor | None, outputs: Sequence[torch.Tensor]) -> None:
    """Copy bytes into tensors, one after the other."""
    if gathered is None:  # not the root
        return
    lengths = [tensor.numel() * tensor.element_size() for tensor in outputs]
    if sum(lengths) != len(gathered):
        raise ringdl.UsageError(
            f"{len(gathered)} bytes have come, for tensors of {sum(lengths)}; ranks have to pass "
            "tensors of the lengths that the others expect"
        )
    for tensor, part in zip(outputs, gathered.split(lengths), strict=True):  # type: ignore[no-untyped-call]
        fill(tensor, part)


def rows_of(received: Any) -> torch.Tensor:
    """The rows of an alltoall, which may come with how many there are of each rank."""
    rows: torch.Tensor = received[0] if isinstance(received, tuple) else received
    return rows


def in_turn(finishes: Iterable[Finish]) -> Finish:
    """All of them, one after the other."""
    listed = list(finishes)

    def finish() -> None:
        for each in listed:
            each()

    return finish


def nothing() -> None:
    """What has nothing to finish."""

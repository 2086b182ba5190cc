"""Tensors of any strides as flat contiguous ones, and results back in their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

import ringdl

Finish = Callable[[], None]


def flattened(
    tensors: Sequence[torch.Tensor], op: ringdl.Reduction
) -> tuple[list[torch.Tensor], Finish]:
    """Contiguous real tensors to reduce in place of these, and what writes results back.

    Raises:
        UsageError: such tensors have no such reduction.
    """
    flat, finishes = [], []
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ringdl.UsageError(
                f"tensors of layout {tensor.layout} are not reduced here; call to_dense() before, "
                "or, of sparse COO tensors, all_reduce() for each"
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


def as_flat(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish]:
    """A tensor's elements (or bytes, of dtypes that ringdl lacks), and what copies them back."""
    own = _plain(tensor)
    flat = own.reshape(-1)
    if not _is_known(own.dtype):
        flat = flat.view(torch.uint8)
    if own.data_ptr() == tensor.data_ptr():
        return flat, nothing
    return flat, functools.partial(fill, tensor, flat)


def fill(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy elements, or bytes of dtypes that ringdl lacks, into a tensor of any strides."""
    values = flat.reshape(-1)
    if values.dtype == torch.uint8 and not _is_known(tensor.dtype):
        values = values.view(tensor.dtype)
    elif tensor.is_complex():
        values = torch.view_as_complex(flat.reshape(-1, 2))
    if values.dtype != tensor.dtype:
        raise ringdl.UsageError(
            f"{values.dtype} has arrived, for a tensor of {tensor.dtype}; make tensors for results "
            "of the dtype that is sent"
        )
    if values.numel() != tensor.numel():
        raise ringdl.UsageError(
            f"{values.numel()} elements have arrived, for a tensor of shape {tuple(tensor.shape)}; "
            "ranks have to pass tensors of the lengths that the others expect"
        )
    tensor.detach().copy_(values.reshape(tensor.shape))


def deal(gathered: torch.Tensor | None, outputs: Sequence[torch.Tensor]) -> None:
    """Copy what `as_flat` has made of tensors into others, one after the other."""
    if gathered is None:  # not the root
        return
    lengths = [_length(tensor) for tensor in outputs]
    if sum(lengths) != len(gathered):
        raise ringdl.UsageError(
            f"{len(gathered)} elements have arrived, for tensors of {sum(lengths)}; ranks have to "
            "pass tensors of the lengths that the others expect"
        )
    for tensor, part in zip(outputs, gathered.split(lengths), strict=True):  # type: ignore[no-untyped-call]
        fill(tensor, part)


def deal_received(
    received: tuple[torch.Tensor, list[int]], outputs: Sequence[torch.Tensor]
) -> None:
    """The same for what an alltoall gives: rows, and how many came from each rank."""
    gathered, counts = received
    for rank, (count, tensor) in enumerate(zip(counts, outputs, strict=True)):
        if count != _length(tensor):
            raise ringdl.UsageError(
                f"rank {rank} has sent {count} elements, for a tensor of {_length(tensor)}; ranks "
                "have to pass tensors of the lengths that the others expect"
            )
    deal(gathered, outputs)


def check_alike(given: torch.Tensor, own: torch.Tensor) -> None:
    """Check that a rank expects of itself what it sends.

    Raises:
        UsageError: it does not.
    """
    if (given.numel(), given.dtype) != (own.numel(), own.dtype):
        raise ringdl.UsageError(
            f"this rank sends {given.numel()} elements of {given.dtype}, but its own place among "
            f"the results has {own.numel()} of {own.dtype}; make them alike"
        )


def _is_known(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in ringdl._engine.DType.__members__


def _length(tensor: torch.Tensor) -> int:
    """The length of what `as_flat` makes of it."""
    return tensor.numel() * (1 if _is_known(tensor.dtype) else tensor.element_size())


def in_turn(finishes: Iterable[Finish]) -> Finish:
    """All of them, one after the other."""
    listed = list(finishes)

    def finish() -> None:
        for each in listed:
            each()

    return finish


def nothing() -> None:
    """Finish nothing."""

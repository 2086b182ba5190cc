"""Reductions of torch tensors of which each rank gets its rows: see `_reduce_ops`.

The gradient is the allgather of the gradients, for Sum times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import ringdl
from ringdl._reductions import Op
from ringdl._training.compression import AnyCompression, wire_of
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set
from ringdl.torch._compiled import leave_uncompiled
from ringdl.torch._exchange_ops import allgather
from ringdl.torch._handles import Handle, begin, copied, is_tracked, require_tensors
from ringdl.torch._reduce_ops import Scales, gradient_name, part_name, refuse_gradient, scale_


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: AnyCompression = None,
    op: Op = ringdl.Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over all ranks; this rank's rows of it, as evenly dealt as can be.

    With ``compression``, float32 is rounded to that dtype before and after.
    """
    scales = (prescale_factor, postscale_factor)
    if is_tracked(tensor):
        result: torch.Tensor = _Reducescatter.apply(  # type: ignore[no-untyped-call]
            tensor, name, compression, op, process_set, scales
        )
        return result
    return _reducescatter(tensor, name, compression, op, process_set, scales)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = ringdl.Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start `reducescatter`; ``tensor`` must not change until `synchronize` returns."""
    scales = (prescale_factor, postscale_factor)
    return _begin_reducescatter(tensor, name, op, process_set, scales)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: AnyCompression = None,
    op: Op = ringdl.Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of each tensor."""
    return [
        reducescatter(
            tensor,
            part_name(name, number),
            compression,
            op,
            process_set,
            prescale_factor,
            postscale_factor,
        )
        for number, tensor in enumerate(tensors)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = ringdl.Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_reducescatter`."""
    parts = [
        reducescatter_async(
            tensor, part_name(name, number), op, process_set, prescale_factor, postscale_factor
        )
        for number, tensor in enumerate(tensors)
    ]
    return Handle(parts, lambda: [part.wait() for part in parts])


def _begin_reducescatter(
    tensor: torch.Tensor,
    name: str | None,
    op: Op,
    process_set: AnySet,
    scales: Scales,
) -> Handle[torch.Tensor]:
    communicator = communicator_of(process_set)

    def start(key: str | None) -> Handle[torch.Tensor]:
        require_tensors(tensor)
        source = tensor if scales[0] == 1.0 else scale_(copied(tensor), scales[0])
        work = communicator.reducescatter_async(source, op, key)
        return Handle([work], lambda: scale_(work.wait(), scales[1]))

    return begin(communicator, "reducescatter", name, start)


def _reducescatter(
    tensor: torch.Tensor,
    name: str | None,
    compression: AnyCompression,
    op: Op,
    process_set: AnySet,
    scales: Scales,
) -> torch.Tensor:
    wire = wire_of(compression)
    is_rounded = (
        wire is not None and isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32
    )
    source = tensor.detach().to(getattr(torch, wire)) if is_rounded else tensor  # type: ignore[arg-type]
    result: torch.Tensor = _begin_reducescatter(source, name, op, process_set, scales).wait()
    return result.to(tensor.dtype) if is_rounded else result


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        compression: AnyCompression,
        op: Op,
        process_set: AnySet,
        scales: Scales,
    ) -> torch.Tensor:
        ctx.call = (gradient_name(name), op, process_set, scales)
        return _reducescatter(tensor, name, compression, op, process_set, scales)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        name, op, process_set, (before, after) = ctx.call
        refuse_gradient(op)
        size = communicator_of(process_set).size if op == ringdl.Sum else 1
        return allgather(gradient * (before * after * size), name, process_set), *[None] * 5


leave_uncompiled(_Reducescatter)

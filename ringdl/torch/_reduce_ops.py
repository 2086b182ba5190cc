"""Reductions of torch tensors, with the signatures of MPI training scripts.

``name`` matches calls that ranks make in different orders; the in-place forms take tensors of any
strides. ``average=False`` is the older way to say ``op=Sum``. ``prescale_factor`` and
``postscale_factor`` multiply before and after; integers are cut towards zero then.

The forms that return a new tensor at once are differentiable. Gradients are what such scripts
expect: that of an allreduce is the same allreduce of the gradients. So are these: there are second
derivatives, which all ranks take alike.
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
from ringdl.torch._compression import wire_of_sum
from ringdl.torch._handles import Handle, begin, copied, is_tracked, require_tensors


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> torch.Tensor:
    """The reduction of ``tensor`` over all ranks (Average unless given), in a new tensor."""
    scales = (prescale_factor, postscale_factor)
    return _reduced(tensor, _reduction(average, op), name, compression, scales, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> torch.Tensor:
    """Like `allreduce`, in place; returns ``tensor``."""
    scales = (prescale_factor, postscale_factor)
    return _allreduce(tensor, _reduction(average, op), name, None, scales, process_set)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start `allreduce`; `synchronize` of the handle returns the new tensor."""
    scales = (prescale_factor, postscale_factor)
    return _begin_allreduce(
        copied(tensor), _reduction(average, op), name, None, scales, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start `allreduce_`; ``tensor`` is off limits until `synchronize` of the handle returns it."""
    scales = (prescale_factor, postscale_factor)
    return _begin_allreduce(tensor, _reduction(average, op), name, None, scales, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of each tensor, in fewer messages."""
    scales = (prescale_factor, postscale_factor)
    return _reduced_together(
        [*tensors], _reduction(average, op), name, compression, scales, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> list[torch.Tensor]:
    """Like `grouped_allreduce`, in place; returns the tensors."""
    done: list[torch.Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return done


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allreduce`; `synchronize` of the handle returns the new tensors."""
    copies = [copied(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    return _begin_grouped(copies, _reduction(average, op), name, None, scales, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allreduce_`; the tensors are off limits until `synchronize` returns them."""
    scales = (prescale_factor, postscale_factor)
    return _begin_grouped([*tensors], _reduction(average, op), name, None, scales, process_set)


def part_name(name: str | None, number: int) -> str | None:
    """What the collective of one tensor out of several is called."""
    return None if name is None else f"{name}.{number}"


Scales = tuple[float, float]
UNSCALED: Scales = (1.0, 1.0)


def _reduced(tensor: torch.Tensor, *call: Any) -> torch.Tensor:
    """A new tensor, whose gradient is known if this one's is.

    Args:
        tensor: to be reduced.
        call: what else `_allreduce` is told.
    """
    if is_tracked(tensor):
        result: torch.Tensor = _Allreduce.apply(tensor, *call)  # type: ignore[no-untyped-call]
        return result
    return _allreduce(copied(tensor), *call)


def _reduced_together(tensors: Sequence[torch.Tensor], *call: Any) -> list[torch.Tensor]:
    """The same for several, of which one gradient at least is."""
    if any(is_tracked(tensor) for tensor in tensors):
        return [*_GroupedAllreduce.apply(*call, *tensors)]  # type: ignore[no-untyped-call]
    done: list[torch.Tensor] = _begin_grouped([*map(copied, tensors)], *call).wait()
    return done


def _allreduce(
    tensor: torch.Tensor,
    op: Op,
    name: str | None,
    compression: AnyCompression,
    scales: Scales,
    process_set: AnySet,
) -> torch.Tensor:
    is_plain = name is None and scales == UNSCALED and isinstance(tensor, torch.Tensor)
    if is_plain and wire_of(compression) is None:
        if process_set is global_process_set:
            ringdl.allreduce_(tensor, op)
        else:
            communicator_of(process_set).allreduce_(tensor, op)
        return tensor
    result: torch.Tensor = _begin_allreduce(
        tensor, op, name, compression, scales, process_set
    ).wait()
    return result


def _begin_allreduce(
    tensor: torch.Tensor,
    op: Op,
    name: str | None,
    compression: AnyCompression,
    scales: Scales,
    process_set: AnySet,
) -> Handle[torch.Tensor]:
    communicator = communicator_of(process_set)

    def start(key: str | None) -> Handle[torch.Tensor]:
        require_tensors(tensor)
        wire = wire_of_sum(compression, op, tensor.dtype)
        scale_(tensor, scales[0])
        work = communicator.allreduce_async_(tensor, op, key, compression=wire)
        return Handle([work], lambda: scale_(tensor, scales[1]))

    return begin(communicator, "allreduce", name, start)


def _begin_grouped(
    tensors: list[torch.Tensor],
    op: Op,
    name: str | None,
    compression: AnyCompression,
    scales: Scales,
    process_set: AnySet,
) -> Handle[list[torch.Tensor]]:
    communicator = communicator_of(process_set)
    wire = wire_of_sum(compression, op)

    def start(key: str | None) -> Handle[list[torch.Tensor]]:
        for tensor in tensors if scales[0] != 1.0 else ():
            require_tensors(tensor)
            scale_(tensor, scales[0])
        work = communicator.grouped_allreduce_async_(tensors, op, key, compression=wire)
        return Handle([work], lambda: [scale_(tensor, scales[1]) for tensor in tensors])

    return begin(communicator, "grouped_allreduce", name, start)


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place, unseen by autograd; integers are cut towards zero."""
    if factor != 1.0:
        values = tensor.detach()
        if values.is_floating_point():
            values.mul_(factor)
        else:
            values.copy_(values.double() * factor)
    return tensor


def gradient_name(name: str | None) -> str | None:
    """What the collective of a backward pass is called."""
    return None if name is None else f"{name}.gradient"


def refuse_gradient(op: Op) -> None:
    if op not in (ringdl.Average, ringdl.Sum):
        raise ringdl.UsageError(
            f"a reduction by {op} has no gradient here; reduce a detached tensor, or by Sum or "
            "Average"
        )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        op: Op,
        name: str | None,
        compression: AnyCompression,
        scales: Scales,
        process_set: AnySet,
    ) -> torch.Tensor:
        ctx.call = (op, gradient_name(name), compression, scales, process_set)
        return _allreduce(copied(tensor), op, name, compression, scales, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        refuse_gradient(ctx.call[0])
        return _reduced(gradient, *ctx.call), *[None] * 5


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: Op,
        name: str | None,
        compression: AnyCompression,
        scales: Scales,
        process_set: AnySet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (op, gradient_name(name), compression, scales, process_set)
        copies = [copied(tensor) for tensor in tensors]
        return tuple(_begin_grouped(copies, op, name, compression, scales, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        refuse_gradient(ctx.call[0])
        return *[None] * 5, *_reduced_together(gradients, *ctx.call)


def _reduction(average: bool | None, op: Op | None) -> Op:
    if average is not None and op is not None:
        raise ringdl.UsageError("give op or average, not both")
    if average is not None:
        return ringdl.Average if average else ringdl.Sum
    return ringdl.Average if op is None else op


leave_uncompiled(_Allreduce, _GroupedAllreduce)

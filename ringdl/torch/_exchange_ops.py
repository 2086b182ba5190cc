"""Exchanges of torch tensors, with the signatures of MPI training scripts.

``name`` matches calls that ranks make in different orders. Roots are named by their number among
all ranks, in process sets, too; in a `ringdl.Communicator` by their number there.

The forms that return a new tensor at once are differentiable, with the gradients that such scripts
expect: that of an alltoall is the alltoall back; those of an allgather and a broadcast are averaged
over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, overload

import torch

import ringdl
from ringdl._engine import Kind
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set, root_in
from ringdl.torch._compiled import leave_uncompiled
from ringdl.torch._handles import Handle, begin, copied, is_tracked, require_tensors
from ringdl.torch._reduce_ops import allreduce, gradient_name, part_name
from ringdl.torch._sparse import begin_sparse


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: AnySet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, joined along axis 0, where their lengths may differ."""
    if is_tracked(tensor):
        result: torch.Tensor = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
        return result
    gathered: torch.Tensor = allgather_async(tensor, name, process_set).wait()
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: AnySet = global_process_set
) -> Handle[torch.Tensor]:
    """Start `allgather`; ``tensor`` must not change until `synchronize` of the handle returns."""
    communicator = communicator_of(process_set)

    def start(key: str | None) -> Handle[torch.Tensor]:
        require_tensors(tensor)
        work = communicator.allgather_async(tensor, key)
        return Handle([work], work.wait)

    return begin(communicator, "allgather", name, start)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of each tensor."""
    tensors = [*tensors]
    if any(is_tracked(tensor) for tensor in tensors):
        return [
            allgather(tensor, part_name(name, number), process_set)
            for number, tensor in enumerate(tensors)
        ]
    gathered: list[torch.Tensor] = grouped_allgather_async(tensors, name, process_set).wait()
    return gathered


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allgather`."""
    parts = [
        allgather_async(tensor, part_name(name, number), process_set)
        for number, tensor in enumerate(tensors)
    ]
    return Handle(parts, lambda: [part.wait() for part in parts])


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> torch.Tensor:
    """The tensor of ``root_rank``, in a new tensor."""
    if is_tracked(tensor):
        result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
        return result
    return broadcast_(copied(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> torch.Tensor:
    """Overwrite ``tensor`` with that of ``root_rank``; returns it."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start `broadcast`; `synchronize` of the handle returns the new tensor."""
    return broadcast_async_(copied(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start `broadcast_`; ``tensor`` is off limits until `synchronize` of the handle returns it."""
    communicator = communicator_of(process_set)

    def start(key: str | None) -> Handle[torch.Tensor]:
        require_tensors(tensor)
        work = communicator.broadcast_async_(tensor, root_in(process_set, root_rank), key)
        return Handle([work], lambda: tensor)

    return begin(communicator, "broadcast", name, start)


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send each rank its rows, ``splits`` of them or as many as all others, and collect own ones.

    Returns:
        The rows from all ranks, in their order; if ``splits`` is given, also how many came from
        each.
    """
    if is_tracked(tensor):
        rows, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    else:
        rows, received = alltoall_async(tensor, splits, name, process_set).wait()
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Start `alltoall`; `synchronize` returns the rows and how many came from each, in any case."""
    communicator = communicator_of(process_set)
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def start(key: str | None) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
        require_tensors(tensor)
        size, dealt = communicator.size, cast("Sequence[int] | None", splits)
        if splits is None and tensor.ndim > 0 and tensor.shape[0] % size == 0:
            dealt = [tensor.shape[0] // size] * size  # so that received rows are counted, too
        work = communicator.alltoall_async(tensor, dealt, key)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            rows, counts = work.wait()
            return rows, torch.tensor(counts, dtype=dtype)

        return Handle([work], finish)

    return begin(communicator, "alltoall", name, start)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ringdl.Reduction,
    process_set: AnySet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to sum or average a sparse tensor; call what is returned, or `synchronize` it.

    The result is coalesced, and the same bits on all ranks.
    """
    communicator = communicator_of(process_set)
    with communicator._telling(Kind.allgather, f"{name}.indices", f"{name}.values"):
        if not tensor.is_sparse:
            raise ringdl.UsageError(
                "sparse_allreduce_async takes a sparse tensor, not one of layout "
                f"{tensor.layout}; use allreduce_async"
            )
        if op not in (ringdl.Average, ringdl.Sum):
            raise ringdl.UsageError(f"sparse tensors are reduced with Average or Sum, not {op}")
    _, end = begin_sparse(tensor, tensor, tensor.sparse_dim(), op, communicator, name)

    def synchronize() -> torch.Tensor:
        result = end()
        assert result is not None  # this rank has given one
        return result

    return synchronize


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: AnySet = global_process_set,
) -> Any:
    """The picklable object of ``root_rank``; what other ranks pass is ignored."""
    root = root_in(process_set, root_rank)
    return communicator_of(process_set).broadcast_object(obj, root, name)


def allgather_object(
    obj: Any, name: str | None = None, process_set: AnySet = global_process_set
) -> list[Any]:
    """The picklable objects of all ranks, in their order."""
    return communicator_of(process_set).allgather_object(obj, name)


def barrier(process_set: AnySet = global_process_set) -> None:
    """Return once all ranks have called."""
    communicator_of(process_set).barrier()


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: AnySet
    ) -> torch.Tensor:
        ctx.rows = tensor.shape[0] if tensor.ndim > 0 else 1
        ctx.shape = tensor.shape
        ctx.call = (gradient_name(name), process_set)
        gathered: torch.Tensor = allgather_async(tensor, name, process_set).wait()
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.call
        communicator = communicator_of(process_set)
        average = allreduce(gradient, name=name, process_set=process_set)
        counts = communicator.allgather(torch.tensor([ctx.rows]), name)
        first = int(counts[: communicator.rank].sum())
        return average.narrow(0, first, ctx.rows).reshape(ctx.shape), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: AnySet
    ) -> torch.Tensor:
        ctx.call = (root_rank, gradient_name(name), process_set)
        return broadcast_(copied(tensor), root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        root_rank, name, process_set = ctx.call
        average = allreduce(gradient, name=name, process_set=process_set)
        if communicator_of(process_set).rank != root_in(process_set, root_rank):
            # Zeros that depend on it, so that all ranks take part in a second derivative.
            average = average.masked_fill(average.new_ones((), dtype=torch.bool), 0)
        return average, None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: AnySet,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = alltoall_async(tensor, splits, name, process_set).wait()
        ctx.mark_non_differentiable(received)
        ctx.call = (received, gradient_name(name), process_set)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        back, _counts = alltoall(gradient, *ctx.call)
        return back, None, None, None


leave_uncompiled(_Allgather, _Broadcast, _Alltoall)

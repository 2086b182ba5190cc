"""Collectives on torch CPU tensors, with the argument names of MPI training scripts.

Everything else is as in `ringdl.Communicator`: results carry no autograd graph, ``name`` matches
calls that ranks make in different orders, and the in-place forms take tensors of any strides.
``average=False`` is the older way to say ``op=Sum``.
"""

from __future__ import annotations

from typing import Any

import torch

import ringdl


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ringdl.Reduction | None = None,
) -> torch.Tensor:
    """The reduction of ``tensor`` over all ranks (Average unless given), in a new tensor."""
    result: torch.Tensor = ringdl.allreduce(tensor, _reduction(average, op), name)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ringdl.Reduction | None = None,
) -> torch.Tensor:
    """Like `allreduce`, in place; returns ``tensor``."""
    ringdl.allreduce_(tensor, _reduction(average, op), name)
    return tensor


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ringdl.Reduction | None = None,
) -> ringdl.Work:
    """Start `allreduce`; `synchronize` of the work returns the new tensor."""
    return ringdl.allreduce_async(tensor, _reduction(average, op), name)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ringdl.Reduction | None = None,
) -> ringdl.Work:
    """Start `allreduce_`; ``tensor`` is off limits until `synchronize` of the work returns it."""
    return ringdl.allreduce_async_(tensor, _reduction(average, op), name)


def synchronize(work: ringdl.Work) -> Any:
    """Wait for a work; returns its tensor."""
    return work.wait()


def poll(work: ringdl.Work) -> bool:
    """Whether `synchronize` of the work would return at once."""
    return work.done()


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The tensors of all ranks, joined along axis 0, where their lengths may differ."""
    result: torch.Tensor = ringdl.allgather(tensor, name)
    return result


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of ``root_rank``, in a new tensor."""
    result: torch.Tensor = ringdl.broadcast(tensor, root_rank, name)
    return result


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite ``tensor`` with that of ``root_rank``; returns it."""
    ringdl.broadcast_(tensor, root_rank, name)
    return tensor


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The picklable object of ``root_rank``; what other ranks pass is ignored."""
    return ringdl.broadcast_object(obj, root_rank, name)


def _reduction(average: bool | None, op: ringdl.Reduction | None) -> ringdl.Reduction:
    if average is not None and op is not None:
        raise ringdl.UsageError("give op or average, not both")
    if average is not None:
        return ringdl.Average if average else ringdl.Sum
    return ringdl.Average if op is None else op

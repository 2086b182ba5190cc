"""Differentiable exchanges along an axis of a grid.

A tensor is *the same* on all ranks of the axis, or each has a *part* of it along a dimension, or
they have *addends* of it. Each function says what it takes and gives, and its gradient is taken
and given the other way round:

```
               takes       gives            the gradient
copy           the same    the same         addends -> their sum
add            addends     their sum        the same -> the same
gather         parts       the same         the same -> own part
scatter        the same    own part         parts -> the same
allgather      parts       the same         addends -> own part of their sum
reducescatter  addends     own part of sum  parts -> the same
alltoall       parts along one dimension -> parts along another; so does the gradient
send, receive  from one rank to another; the gradient goes back
```

So `gather` is for what all ranks use alike afterwards, and `allgather` for what each uses in its
own way. Parts are as equal as can be: the first ranks have one more where they cannot (`span`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

import ringdl
from ringdl import Communicator


def span(size: int, communicator: Communicator, rank: int | None = None) -> tuple[int, int]:
    """Which of ``size`` a rank has, by default this one: from which on, and how many."""
    rank = communicator.rank if rank is None else rank
    least, more = divmod(size, communicator.size)
    return rank * least + min(rank, more), least + (rank < more)


def part(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of a tensor: a view."""
    return x.narrow(dim, *span(x.shape[dim], communicator))


def copy(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """What all have; each is going to use it in its own way."""
    return x if communicator.size == 1 else applied(_Copy, x, communicator)


def add(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    return x if communicator.size == 1 else applied(_Add, x, communicator)


def gather(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """The whole of what ranks have parts of; all are going to use it alike."""
    return x if communicator.size == 1 else applied(_Gather, x, communicator, dim)


def scatter(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of what all have."""
    return x if communicator.size == 1 else applied(_Scatter, x, communicator, dim)


def allgather(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """The whole of what ranks have parts of; each is going to use it in its own way."""
    return x if communicator.size == 1 else applied(_Allgather, x, communicator, dim)


def reducescatter(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of the sum of all ranks' tensors."""
    return x if communicator.size == 1 else applied(_Reducescatter, x, communicator, dim)


def alltoall(x: torch.Tensor, communicator: Communicator, cut: int, joined: int) -> torch.Tensor:
    """This rank's part along ``cut`` of what ranks have parts of along ``joined``.

    Raises:
        UsageError: there is less along ``cut`` than ranks.
    """
    if x.shape[cut] < communicator.size:
        raise ringdl.UsageError(
            f"{x.shape[cut]} along dimension {cut} cannot be cut over {communicator.size} ranks"
        )
    return x if communicator.size == 1 else applied(_Alltoall, x, communicator, cut, joined)


def send(x: torch.Tensor, to: int, communicator: Communicator) -> torch.Tensor:
    """Send a tensor, which requires a gradient, to a rank, which calls `receive`.

    Returns:
        A number, 0: add it to what ``backward()`` is called of, so that the gradient is awaited.
    """
    return applied(_Send, x, to, communicator)


def receive(like: torch.Tensor, source: int, communicator: Communicator) -> torch.Tensor:
    """What a rank sends by `send`; its gradient is sent back.

    Args:
        like: of its shape and dtype.
        source: the rank.
        communicator: of both.
    """
    return applied(_Receive, like.detach().requires_grad_(), source, communicator)


def applied(function: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
    """The result of an autograd.Function."""
    result: torch.Tensor = function.apply(x, *call)
    return result


def summed(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """A new tensor, not differentiable."""
    return communicator.allreduce_(x.detach().clone(), ringdl.Sum)


def whole(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """Parts put together, not differentiable."""
    rows = communicator.allgather(x.detach().movedim(dim, 0).contiguous())
    return rows.movedim(0, dim).contiguous()


def _own_sum(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    rows = communicator.reducescatter(x.detach().movedim(dim, 0).contiguous(), ringdl.Sum)
    return rows.movedim(0, dim).contiguous()


def _exchanged(x: torch.Tensor, communicator: Communicator, cut: int, joined: int) -> torch.Tensor:
    parts = [
        x.narrow(cut, *span(x.shape[cut], communicator, rank)).movedim(joined, 0).contiguous()
        for rank in range(communicator.size)
    ]
    own = parts[communicator.rank]
    # Rows of one length for alltoall, whatever the parts' shapes: elements.
    flat = torch.cat([each.reshape(-1) for each in parts])
    got, counts = communicator.alltoall(flat, [each.numel() for each in parts])
    rest = own.shape[1:]
    blocks = [
        each.reshape(-1, *rest) for each in torch.split(got, [int(count) for count in counts])
    ]
    return torch.cat(blocks).movedim(0, joined).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.call = communicator
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return summed(gradient, ctx.call), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        return summed(x, communicator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
        ctx.call = call
        return whole(x, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return part(gradient, *ctx.call), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
        ctx.call = call
        return part(x, *call).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return whole(gradient, *ctx.call), None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
        ctx.call = call
        return whole(x, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _own_sum(gradient, *ctx.call), None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
        ctx.call = call
        return _own_sum(x, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return whole(gradient, *ctx.call), None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
        ctx.call = call
        return _exchanged(x, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        communicator, cut, joined = ctx.call
        return _exchanged(gradient, communicator, joined, cut), None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *call: Any) -> torch.Tensor:
        to, communicator = ctx.call = call
        ctx.like = torch.empty_like(x, memory_format=torch.contiguous_format)
        communicator.send(x.detach().contiguous(), to)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        to, communicator = ctx.call
        return communicator.recv_(ctx.like, to), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, *call: Any) -> torch.Tensor:
        source, communicator = ctx.call = call
        into = torch.empty_like(like, memory_format=torch.contiguous_format)
        got: torch.Tensor = communicator.recv_(into, source)
        return got

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        source, communicator = ctx.call
        communicator.send(gradient.contiguous(), source)
        return torch.zeros_like(gradient), None, None

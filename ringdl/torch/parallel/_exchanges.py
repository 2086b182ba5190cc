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

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

import ringdl
from ringdl import Communicator
from ringdl._engine import Kind
from ringdl._parts import split

Step: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def span(size: int, communicator: Communicator, rank: int | None = None) -> tuple[int, int]:
    """Which of ``size`` a rank has, by default this one: from which on, and how many."""
    return split(size, communicator.size, communicator.rank if rank is None else rank)


def part(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of a tensor: a view."""
    return x.narrow(dim, *span(x.shape[dim], communicator))


def copy(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """What all have; each is going to use it in its own way."""
    return exchanged(
        x,
        communicator,
        lambda x: x.view_as(x),
        lambda gradient: summed(gradient, communicator),
    )


def add(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    return exchanged(
        x,
        communicator,
        lambda x: summed(x, communicator),
        lambda gradient: gradient,
    )


def gather(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """The whole of what ranks have parts of; all are going to use it alike.

    Raises:
        UsageError: this rank's part is not the one that `span` says.
    """
    return exchanged(
        x,
        communicator,
        lambda x: _whole_of_spans(x, communicator, dim),
        lambda gradient: part(gradient, communicator, dim),
    )


def scatter(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of what all have."""
    return exchanged(
        x,
        communicator,
        lambda x: part(x, communicator, dim).clone(memory_format=torch.contiguous_format),
        lambda gradient: whole(gradient, communicator, dim),
    )


def allgather(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """The whole of what ranks have parts of; each is going to use it in its own way.

    Raises:
        UsageError: this rank's part is not the one that `span` says.
    """
    return exchanged(
        x,
        communicator,
        lambda x: _whole_of_spans(x, communicator, dim),
        lambda gradient: _own_sum(gradient, communicator, dim),
    )


def reducescatter(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of the sum of all ranks' tensors."""
    return exchanged(
        x,
        communicator,
        lambda x: _own_sum(x, communicator, dim),
        lambda gradient: whole(gradient, communicator, dim),
    )


def alltoall(x: torch.Tensor, communicator: Communicator, cut: int, joined: int) -> torch.Tensor:
    """This rank's part along ``cut`` of what ranks have parts of along ``joined``.

    Raises:
        UsageError: there is less along ``cut`` than ranks, or the dimensions are the same; the
            other ranks get a MismatchError.
    """
    with communicator._telling(Kind.alltoall, None):
        if cut % x.ndim == joined % x.ndim:
            raise ringdl.UsageError(f"cut and joined are both dimension {cut % x.ndim}; pass two")
        if x.shape[cut] < communicator.size:
            raise ringdl.UsageError(
                f"{x.shape[cut]} along dimension {cut} cannot be cut over {communicator.size} ranks"
            )
    shape = x.shape
    return exchanged(
        x,
        communicator,
        lambda x: _swapped(x, communicator, cut, joined),
        lambda gradient: _swapped(gradient, communicator, joined, cut, shape),
    )


def send(x: torch.Tensor, to: int, communicator: Communicator) -> torch.Tensor:
    """Send a tensor, which requires a gradient, to a rank, which calls `receive`.

    Returns:
        A number, 0: add it to what ``backward()`` is called of, so that the gradient is awaited.
    """
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    name = _gradient_name(communicator, communicator.rank, to)

    def there(x: torch.Tensor) -> torch.Tensor:
        communicator.send(x.contiguous(), to)
        return x.new_zeros(())

    return applied(_Exchange, x, there, lambda _: communicator.recv_(like, to, name))


def receive(like: torch.Tensor, source: int, communicator: Communicator) -> torch.Tensor:
    """What a rank sends by `send`; its gradient is sent back.

    Args:
        like: of its shape and dtype.
        source: the rank.
        communicator: of both.
    """
    name = _gradient_name(communicator, source, communicator.rank)

    def there(like: torch.Tensor) -> torch.Tensor:
        into = torch.empty_like(like, memory_format=torch.contiguous_format)
        got: torch.Tensor = communicator.recv_(into, source)
        return got

    def back(gradient: torch.Tensor) -> torch.Tensor:
        communicator.send(gradient.contiguous(), source, name)
        return torch.zeros_like(gradient)

    return applied(_Exchange, like.detach().requires_grad_(), there, back)


def _gradient_name(communicator: Communicator, source: int, to: int) -> str:
    """Of the gradient of the next message between two ranks, in whichever order gradients come."""
    return f"ringdl.gradient.{communicator._count('differentiable', source, to)}"


def exchanged(x: torch.Tensor, communicator: Communicator, there: Step, back: Step) -> torch.Tensor:
    """What an exchange of ranks makes of a tensor; one rank has nothing to exchange.

    Args:
        x: the tensor.
        communicator: the ranks.
        there: the exchange.
        back: what it is for gradients.
    """
    return x if communicator.size == 1 else applied(_Exchange, x, there, back)


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


def _whole_of_spans(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    rows = whole(x, communicator, dim)
    expected = span(rows.shape[dim], communicator)[1]
    if x.shape[dim] != expected:  # its gradient would be another rank's
        raise ringdl.UsageError(
            f"this rank's part has {x.shape[dim]} of {rows.shape[dim]} along dimension {dim}; "
            f"pass {expected}, as parallel.span says"
        )
    return rows


def _own_sum(x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    rows = communicator.reducescatter(x.detach().movedim(dim, 0).contiguous(), ringdl.Sum)
    return rows.movedim(0, dim).contiguous()


def _swapped(
    x: torch.Tensor,
    communicator: Communicator,
    cut: int,
    joined: int,
    shape: torch.Size | None = None,  # of the result, if it is known
) -> torch.Tensor:
    parts = [
        x.narrow(cut, *span(x.shape[cut], communicator, rank)).movedim(joined, 0).contiguous()
        for rank in range(communicator.size)
    ]
    own = parts[communicator.rank]
    # Rows of one length for alltoall, whatever the parts' shapes: elements.
    flat = torch.cat([each.reshape(-1) for each in parts])
    got, counts = communicator.alltoall(flat, [each.numel() for each in parts])
    rest = own.shape[1:]
    if shape is not None and shape.numel() == 0:  # the counts do not tell how many rows there are
        return got.reshape(shape)
    if rest.numel() == 0:
        rows = int(communicator.allreduce(torch.tensor(x.shape[joined]), ringdl.Sum))
        return got.reshape(rows, *rest).movedim(0, joined)
    blocks = [
        each.reshape(-1, *rest) for each in torch.split(got, [int(count) for count in counts])
    ]
    return torch.cat(blocks).movedim(0, joined).contiguous()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Step, back: Step) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.back(gradient), None, None

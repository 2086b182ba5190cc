"""Gradients that live in ``ringdl.Buckets`` and are averaged while ``backward()`` still runs.

How a gradient gets there. Each parameter has one view into the buckets, with the parameter's own
strides. A hook runs after autograd has accumulated into ``parameter.grad``; if that is a fresh
tensor (``zero_grad()`` had set it to None) it is copied into the view, and the view becomes
``parameter.grad``; if it is the view already, nothing is copied. Then the hook marks the gradient
ready, and the allreduce of a full bucket overlaps the rest of backward.

When gradients are averaged: when the outermost ``backward()`` returns, in a callback that autograd
runs at its end. There, parameters whose hook did not run but which hold a gradient (from an earlier
pass) count as produced, the others as missing; afterwards ``parameter.grad`` is the view where any
rank produced it and None where none did.

Reentrant checkpointing runs a backward inside a backward. A parameter may be used inside and
outside, so its hook may run several times: what is touched by an inner backward waits for the end
of the outermost. Which parameters these are is learnt in the first backward, which therefore
launches nothing early; one that turns up later is refused once with a UsageError. If all hooks run
in inner backwards (the whole model is checkpointed), autograd offers no callback at the outermost
end: gradients are then averaged in ``step()``.

Sharp bits: the view is reused, so a tensor kept from ``parameter.grad`` changes in the next
backward; the gradient of ``backward(create_graph=True)`` is detached (``torch.autograd.grad`` for
second derivatives); hooks on a parameter that change its gradient must be registered before
wrapping.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch.utils.dlpack import from_dlpack

import ringdl

_BACKWARD_CODES = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
"""By a parameter's id, which is not reused: the owner keeps its parameters alive."""


def is_nested() -> bool:
    """Whether the Python stack holds a backward inside another one."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth < 2:
        depth += frame.f_code in _BACKWARD_CODES
        frame = frame.f_back
    return depth == 2


class _Outermost:
    """The outermost backward in progress, and the gradients that it has touched so far.

    There is one callback for all, which averages in the order of construction: ranks may reach the
    parameters of two optimizers in different orders, and each would wait for the other.
    """

    def __init__(self) -> None:
        self.task = -1
        self.touched: list[Gradients] = []

    def add(self, task: int, gradients: Gradients) -> None:
        if task != self.task:
            self.task, self.touched = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self.touched.append(gradients)

    def _end(self) -> None:
        self.task, touched, self.touched = -1, self.touched, []
        for gradients in sorted(touched, key=lambda gradients: gradients.number):
            gradients.finish_backward()


_outermost = _Outermost()


class Gradients:
    """The gradients of one optimizer's parameters. Collective: ranks construct in the same order.

    Holds the parameters and views; the hooks on the parameters refer to it weakly and are removed
    with it.

    Args:
        named_parameters: CPU parameters that require gradients, in the same order on every rank.
        op: Average or Sum over the ranks.
        passes_per_round: average in every so many-th backward.

    Raises:
        UsageError: if a parameter is not on the CPU or not real floating point.
        MismatchError: on every rank, if names, shapes, dtypes or order differ.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        op: ringdl.Reduction,
        passes_per_round: int,
    ) -> None:
        self.number = next(_numbers)
        self.is_local = False
        self.is_pending = False
        """Whether a backward has added to the gradients since they were averaged."""
        self._is_averaged = False
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._buckets = ringdl.Buckets(
            [_spec(name, parameter) for name, parameter in named_parameters], op=op
        )
        count = len(named_parameters)
        self._views = [from_dlpack(self._buckets.dlpack(index)) for index in range(count)]
        self._is_ready = [False] * count
        self._waits_for_end = [False] * count
        self._is_learning = True
        self._passes = 0
        self._passes_per_round = passes_per_round
        self._averages_at_end = False
        self._task: int | None = None
        self._nested_task: int | None = None
        handles = []
        for index, parameter in enumerate(self._parameters):
            hook = _make_hook(weakref.ref(self), index)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            _owners[id(parameter)] = self
        weakref.finalize(self, _remove_all, handles)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Backward passes in this context add to the local gradients; nothing is averaged."""
        was_local, self.is_local = self.is_local, True
        try:
            yield
        finally:
            self.is_local = was_local

    def synchronize(self) -> None:
        """Average what is not averaged yet; without any backward, join in."""
        if self.is_pending or not self._is_averaged:
            self._average()

    def expect_round(self) -> None:
        """The gradients have been used or discarded: all ranks average before the next step."""
        self._is_averaged = False
        self._passes = 0

    def finish_backward(self) -> None:
        """The outermost backward is at its end."""
        self._task = None
        self._is_learning = False
        self._passes += 1
        if self._averages_at_end:
            self._average()

    def accumulated(self, index: int) -> None:
        """The hook: autograd has added to gradient ``index``."""
        task = _current_task()
        if task != self._task and task != self._nested_task:
            self._begin_backward(task)
        if self._parameters[index].grad is not self._views[index]:
            self._adopt(index)
        if task == self._nested_task:
            self._waits_for_end[index] = True
            if self._is_ready[index]:
                self._waits_for_end = [True] * len(self._waits_for_end)
                raise ringdl.UsageError(
                    f"the gradient of {self._names[index]!r} changed while it was being averaged: "
                    "it is used in a reentrant checkpoint and outside of it, but was not in the "
                    "first backward; use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
        elif self._averages_at_end and not self._is_learning and not self._waits_for_end[index]:
            self._mark_ready(index)

    def _begin_backward(self, task: int) -> None:
        self.is_pending = True
        if is_nested():
            self._nested_task = task
            return
        if any(self._is_ready):
            # The last backward failed half-way; the other ranks wait for what it has begun.
            self._buckets.wait()
            self._is_ready = [False] * len(self._is_ready)
        self._task = task
        self._averages_at_end = (
            not self.is_local and (self._passes + 1) % self._passes_per_round == 0
        )
        _outermost.add(task, self)

    def _adopt(self, index: int) -> None:
        """Move a gradient that autograd made elsewhere into its view."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ringdl.UsageError(
                f"the gradient of {self._names[index]!r} is sparse, which ringdl does not average; "
                "construct the layer with sparse=False"
            )
        view.copy_(gradient.detach())
        parameter.grad = view

    def _mark_ready(self, index: int) -> None:
        self._is_ready[index] = True
        self._buckets.ready(index)

    def _average(self) -> None:
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and not self._is_ready[index]:
                if gradient is not self._views[index]:
                    self._adopt(index)
                self._mark_ready(index)
        is_produced = self._buckets.wait()
        for parameter, view, produced in zip(
            self._parameters, self._views, is_produced, strict=True
        ):
            if produced and parameter.grad is not view:
                parameter.grad = view
        self._is_ready = [False] * len(self._is_ready)
        self._task = None
        self._is_learning = False
        self.is_pending = False
        self._is_averaged = True


def find_owner(parameter: torch.Tensor) -> Gradients | None:
    """Who averages this parameter already, if anybody does."""
    return _owners.get(id(parameter))


def _make_hook(gradients: weakref.ref[Gradients], index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        owner = gradients()
        if owner is not None:
            owner.accumulated(index)

    return hook


def _remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _spec(name: str, parameter: torch.Tensor) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    if parameter.device.type != "cpu" or not parameter.is_floating_point():
        raise ringdl.UsageError(
            f"the parameter {name!r} is {parameter.dtype} on {parameter.device}; "
            "ringdl.torch averages real floating-point gradients on the CPU"
        )
    strides = torch.empty_like(parameter, device="meta").stride()
    return name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), strides

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

Sparse gradients are summed apart, at the end of the round (see ``_sparse``). Which parameters have
them is learnt from the note in the buckets (see ``_fused``): in the round in which one turns up,
its parameter leaves the buckets on all ranks, and the others get new ones.

Sharp bits: the view is reused, so a tensor kept from ``parameter.grad`` changes in the next
backward; the gradient of ``backward(create_graph=True)`` is detached (``torch.autograd.grad`` for
second derivatives); hooks on a parameter that change its gradient must be registered before
wrapping.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

import ringdl
from ringdl import _timeline
from ringdl._reductions import CompressionName
from ringdl.torch._backward import is_nested, outermost
from ringdl.torch._compiled import uncompiled
from ringdl.torch._fused import FusedGradients, raise_out_of_step
from ringdl.torch._sparse import agree_on_sparse_dims, begin_sparse

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_COMPLEX = (torch.complex64, torch.complex128)
_numbers = itertools.count()
_made: weakref.WeakKeyDictionary[ringdl.Communicator, Iterator[int]] = weakref.WeakKeyDictionary()
"""The number of the next wrapped optimizer of a communicator."""
_owners: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
"""By a parameter's id, which is not reused: the owner keeps its parameters alive."""


class Gradients:
    """The gradients of one optimizer's parameters. Collective: ranks construct in the same order.

    Holds the parameters and views; the hooks on the parameters refer to it weakly and are removed
    with it.

    Args:
        named_parameters: CPU parameters that require gradients, in the same order on every rank.
        op: Average or Sum over the ranks.
        compression: as `ringdl.Buckets` takes it.
        passes_per_round: average in every so many-th backward.
        sparse_as_dense: put sparse gradients into the buckets, too.
        communicator: the ranks.
        predivisor: of dense gradients before they are summed; averages are multiplied by it.
        check_replicas: whether the first step compares the parameters of all ranks.
        makes_sparse: what is averaged as dense becomes sparse in the end, for an optimizer that
            takes nothing else.

    Raises:
        UsageError: if a parameter is not on the CPU or not floating point.
        MismatchError: on every rank, if names, shapes, dtypes or order differ.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        op: ringdl.Reduction,
        compression: CompressionName | None,
        passes_per_round: int,
        sparse_as_dense: bool,
        communicator: ringdl.Communicator,
        predivisor: float = 1.0,
        check_replicas: bool = True,
        makes_sparse: bool = False,
    ) -> None:
        for name, parameter in named_parameters:
            _refuse_unfit(name, parameter)
        self.number = next(_numbers)
        self.op = op
        self.compression = compression
        self.communicator = communicator
        self.step = 0
        """How many steps of the optimizer have ended, since all ranks last joined."""
        self._checks_replicas = check_replicas
        self.are_replicas_checked = not check_replicas
        """Whether parameters were found to be equal on all ranks since then, or need not be."""
        self._is_replaced = False
        self.is_local = False
        self.is_pending = False
        """Whether a backward has added to the gradients since they were averaged."""
        self._is_averaged = False
        self._named = list(named_parameters)
        self._parameters = [parameter for _, parameter in named_parameters]
        self._predivisor = predivisor
        self._fused = self._fuse(dict(enumerate(self._named)))
        made = _made.setdefault(communicator, itertools.count())
        self.key = f"ringdl.torch.{next(made)}"
        """What its collectives are matched by."""
        self._sparse_as_dense = sparse_as_dense
        self._makes_sparse = makes_sparse
        self._sparse_dims: dict[int, int] = {}
        self._sums: dict[int, tuple[torch.Tensor, int]] = {}
        """For op=Sum: the gradients as the last round left them, and their versions."""
        self._waits_for_end: set[int] = set()
        self._is_learning = True
        self._observed: dict[int, None] = {}
        """In their order: the gradients that the first backward has accumulated."""
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
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)

    def replace(self) -> None:
        """Others average these parameters from now on, for another optimizer."""
        self._is_replaced = True
        self._remove_hooks()
        for parameter in self._parameters:
            if _owners.get(id(parameter)) is self:
                del _owners[id(parameter)]

    def refuse_replaced(self) -> None:
        """Of calls that would average.

        Raises:
            UsageError: others average these parameters.
        """
        if self._is_replaced:
            raise ringdl.UsageError(
                f"the parameter {self._named[0][0]!r} was wrapped again, in another optimizer, "
                "which has replaced this one: step that one"
            )

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
        self.refuse_replaced()
        if self.is_pending or not self._is_averaged:
            self._average()

    def expect_round(self) -> None:
        """The gradients have been used or discarded: all ranks average before the next step."""
        self._is_averaged = False
        self._passes = 0

    def set_passes_per_round(self, passes: int) -> None:
        """Average in every so many-th backward from now on."""
        self._passes_per_round = passes

    def replan(self) -> None:
        """Put gradients into buckets in the order of rank 0's first backward. Collective.

        Raises:
            UsageError: on every rank, if rank 0 has had none; on this one, if gradients are being
                averaged.
        """
        self.refuse_replaced()
        if self._fused.ready:
            raise ringdl.UsageError(
                "replan() while gradients are being averaged: call it after step()"
            )
        order = self.communicator.broadcast_object([*self._observed], name=f"{self.key}.order")
        if not order:
            raise ringdl.UsageError("replan() before the first backward(): call it after step()")
        last = self._fused.views.keys() - set(order)  # what no hook has run for comes last
        ready = [index for index in order if index in self._fused.views] + sorted(last)
        self._fuse_again({index: self._named[index] for index in reversed(ready)})

    def finish_step(self) -> None:
        """The optimizer has stepped."""
        self.step += 1
        self.expect_round()

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
        if self._is_learning:
            self._observed.setdefault(index)
        if not self._adopt(index):
            return
        if task == self._nested_task:
            self._waits_for_end.add(index)
            if index in self._fused.ready:
                self._waits_for_end.update(range(len(self._parameters)))
                raise ringdl.UsageError(
                    f"the gradient of {self._named[index][0]!r} changed while it was being "
                    "averaged: it is used in a reentrant checkpoint and outside of it, but was not "
                    "in the first backward; use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
        elif self._averages_at_end and not self._is_learning and index not in self._waits_for_end:
            self._fused.mark_ready(index)

    def _begin_backward(self, task: int) -> None:
        self.is_pending = True
        if is_nested():
            self._nested_task = task
            return
        if self._fused.ready:
            # The last backward failed half-way; the other ranks wait for what it has begun.
            self._reduce([None] * len(self._parameters))
        self._task = task
        self._averages_at_end = (
            not self.is_local and (self._passes + 1) % self._passes_per_round == 0
        )
        outermost.add(task, self)

    def _adopt(self, index: int) -> bool:
        """Move a gradient that autograd made elsewhere into its view; False if it stays sparse."""
        parameter, view = self._parameters[index], self._fused.views.get(index)
        gradient = parameter.grad
        assert gradient is not None
        if view is None or (gradient.is_sparse and not self._sparse_as_dense):
            return False
        if gradient is not view:
            view.copy_(gradient.detach().to_dense())
            parameter.grad = view
        return True

    def _average(self) -> None:
        with _timeline.span("average", f"gradients of {self.key}"):
            self._average_all()

    def _average_all(self) -> None:
        silent = {index for index in self._sums if self._is_summed_already(index)}
        own = [
            None if index in silent else parameter.grad
            for index, parameter in enumerate(self._parameters)
        ]
        for index, gradient in enumerate(own):
            if gradient is not None and index not in self._fused.ready and self._adopt(index):
                self._fused.mark_ready(index)
                own[index] = self._parameters[index].grad
        averages = self._reduce(own)
        for index, average in averages.items():
            if self._makes_sparse and not average.is_sparse:
                average = average.to_sparse(1)
            if self._parameters[index].grad is not average:
                self._parameters[index].grad = average
        if self.op == ringdl.Sum:
            self._sums = {
                index: (parameter.grad, parameter.grad._version)
                for index, parameter in enumerate(self._parameters)
                if parameter.grad is not None
            }
        self._task = None
        self._is_learning = False
        self.is_pending = False
        self._is_averaged = True

    def _is_untouched_sum(self, index: int, gradient: torch.Tensor | None) -> bool:
        known, version = self._sums[index]
        return gradient is known and known._version == version

    def _is_summed_already(self, index: int) -> bool:
        """Whether the gradient is the sum over the ranks, untouched, which rank 0 contributes."""
        gradient = self._parameters[index].grad
        return self.communicator.rank > 0 and self._is_untouched_sum(index, gradient)

    def _reduce(self, gradients: list[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """End the round on all ranks; what some rank has produced, by index.

        Args:
            gradients: of these, those in views count if they are ready, and sparse ones always.
        """
        unknown = {
            index: gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.is_sparse and index in self._fused.views
        }
        ended = self._fused.end_round(self.step, bool(unknown))
        if not ended.is_in_step:
            raise_out_of_step(self.step, self.communicator, f"{self.key}.steps")
        dense_parts: dict[int, torch.Tensor] = {}
        if ended.has_sparse:
            views, known = self._fused.views, set(self._sparse_dims)
            self._learn_sparse(unknown)
            for index in self._sparse_dims.keys() - known:
                gradients[index] = unknown.get(index)
                if index in ended.produced:
                    dense_parts[index] = views[index]
        averages = {
            index: view for index, view in self._fused.views.items() if index in ended.produced
        }
        begun = {
            index: begin_sparse(
                gradients[index],
                self._parameters[index],
                sparse_dim,
                self.op,
                self.communicator,
                f"{self.key}.{index}",
            )
            for index, sparse_dim in self._sparse_dims.items()
        }
        for index, end in begun.items():
            average = end()
            if average is not None and index in dense_parts:
                average = (
                    average + dense_parts[index].to_sparse(self._sparse_dims[index])
                ).coalesce()
            if average is not None:
                averages[index] = average
        return averages

    def _fuse(self, named: dict[int, tuple[str, torch.Tensor]]) -> FusedGradients:
        return FusedGradients(named, self.op, self.compression, self.communicator, self._predivisor)

    def _learn_sparse(self, unknown: dict[int, torch.Tensor]) -> None:
        """Take what is sparse on any rank out of the buckets; the others move to new ones."""
        self._sparse_dims |= agree_on_sparse_dims(
            unknown, len(self._parameters), self.communicator, f"{self.key}.sparse"
        )
        self._fuse_again(
            {
                index: named
                for index, named in enumerate(self._named)
                if index not in self._sparse_dims
            }
        )

    def _fuse_again(self, named: dict[int, tuple[str, torch.Tensor]]) -> None:
        """Move gradients to new buckets, which hold them in another order, or fewer of them."""
        old_views = self._fused.views
        self._fused = self._fuse(named)
        for index, view in self._fused.views.items():
            old = old_views[index]
            view.copy_(old)
            if self._parameters[index].grad is old:
                self._parameters[index].grad = view
            if index in self._sums and self._is_untouched_sum(index, old):
                self._sums[index] = (view, view._version)

    def start_over(self) -> None:
        """Ranks that may have made another number of steps begin anew, on all of them."""
        self.step = 0
        self.are_replicas_checked = not self._checks_replicas
        self._sums = {}
        self.expect_round()


def start_over() -> None:
    """All optimizers begin anew, once all ranks have joined."""
    for gradients in {id(owner): owner for owner in _owners.values()}.values():
        gradients.start_over()


def find_owner(parameter: torch.Tensor) -> Gradients | None:
    """Who averages this parameter already, if anybody does."""
    return _owners.get(id(parameter))


def _make_hook(gradients: weakref.ref[Gradients], index: int) -> Callable[[torch.Tensor], None]:
    @uncompiled
    def hook(_: torch.Tensor) -> None:
        owner = gradients()
        if owner is None:
            return
        if _timeline.recording is None:
            owner.accumulated(index)
        else:
            with _timeline.span("hook", owner._named[index][0]):
                owner.accumulated(index)

    return hook


def _remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _refuse_unfit(name: str, parameter: torch.Tensor) -> None:
    is_averaged = parameter.is_floating_point() or parameter.dtype in _COMPLEX
    if parameter.device.type != "cpu" or not is_averaged:
        raise ringdl.UsageError(
            f"the parameter {name!r} is {parameter.dtype} on {parameter.device}; "
            "ringdl.torch averages floating-point gradients on the CPU, complex64 and complex128 "
            "among them"
        )

"""Gradients that live in ``ringdl.Buckets`` and are averaged while ``backward()`` still runs.

How a gradient gets there. Each parameter has one view into the buckets, with the parameter's own
strides. A hook runs after autograd has accumulated into ``parameter.grad``; if that is a fresh
tensor (``zero_grad()`` had set it to None) it is copied into the view, and the view becomes
``parameter.grad``; if it is the view already, nothing is copied. Then the hook launches the
gradient, and the allreduce of a full bucket overlaps the rest of backward.

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

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

import ringdl
from ringdl import _arrays, _timeline
from ringdl._engine import DeviceArray
from ringdl._submitters import for_caller
from ringdl._training import Gradients, SparseStore, Spec
from ringdl.torch._backward import is_nested, lock, outermost
from ringdl.torch._compiled import uncompiled
from ringdl.torch._sparse import begin_sparse

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_COMPLEX = (torch.complex64, torch.complex128)
_owners: weakref.WeakValueDictionary[int, Hooks] = weakref.WeakValueDictionary()
"""By a parameter's id, which is not reused: the owner keeps its parameters alive."""


class ParameterGradients(SparseStore[torch.Tensor]):
    """The ``.grad`` of an optimizer's parameters.

    Args:
        named_parameters: parameters that require gradients, in the memory of the CPU or of CUDA
            devices, in the same order on every rank.
        sparse_as_dense: put sparse gradients into the buckets, too.
        makes_sparse: what is averaged as dense becomes sparse in the end, for an optimizer that
            takes nothing else.

    Raises:
        UsageError: if a parameter is on another device or not floating point.
    """

    how_to_wrap = "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())"

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        sparse_as_dense: bool = False,
        makes_sparse: bool = False,
    ) -> None:
        for name, parameter in named_parameters:
            _refuse_unfit(name, parameter)
        self.specs = [_spec(name, parameter) for name, parameter in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self._sparse_as_dense = sparse_as_dense
        self._makes_sparse = makes_sparse

    def device(self, index: int) -> int | None:
        device = self.parameters[index].device
        return device.index if device.type == "cuda" else None

    def stream(self, device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get(self, index: int) -> torch.Tensor | None:
        return self.parameters[index].grad

    def set(self, index: int, gradient: torch.Tensor) -> None:
        self.parameters[index].grad = gradient

    def view(self, index: int, memory: Any) -> torch.Tensor:
        view = from_dlpack(memory)
        return torch.view_as_complex(view) if self.parameters[index].is_complex() else view

    def place(self, view: torch.Tensor) -> Any:
        return view.data_ptr(), view.dtype, view.stride()

    def copy(self, view: torch.Tensor, gradient: torch.Tensor) -> None:
        view.copy_(gradient.detach().to_dense())

    def scale(self, view: torch.Tensor, factor: float) -> None:
        view.mul_(factor)

    def source(self, gradient: torch.Tensor, view: torch.Tensor) -> DeviceArray | None:
        is_packed = (
            gradient.layout == torch.strided
            and gradient.dtype == view.dtype
            and not gradient.is_complex()
            and gradient.shape == view.shape
            and gradient.stride() == view.stride()
            and gradient.device == view.device
            and not gradient.is_neg()
        )
        if not is_packed:
            return None
        source: DeviceArray = _arrays.as_it_lies(gradient.detach())
        return source

    def result(self, view: torch.Tensor) -> torch.Tensor:
        return view.to_sparse(1) if self._makes_sparse and not view.is_sparse else view

    def version(self, gradient: torch.Tensor) -> int:
        return gradient._version

    def sparse_dim(self, gradient: torch.Tensor) -> int:
        return gradient.sparse_dim() if gradient.is_sparse and not self._sparse_as_dense else 0

    def begin_sparse(
        self,
        index: int,
        gradient: torch.Tensor | None,
        sparse_dim: int,
        op: ringdl.Reduction,
        communicator: ringdl.Communicator,
        name: str,
    ) -> Callable[[], torch.Tensor | None]:
        like = self.parameters[index]
        _, end = begin_sparse(gradient, like, sparse_dim, op, communicator, name)
        return end

    def add_dense(
        self, gradient: torch.Tensor, view: torch.Tensor, sparse_dim: int
    ) -> torch.Tensor:
        return (gradient + view.to_sparse(sparse_dim)).coalesce()


class Hooks:
    """Notify `Gradients` of what autograd does.

    The hooks on the parameters refer to this weakly and are removed with it.
    """

    def __init__(self, gradients: Gradients[torch.Tensor], store: ParameterGradients) -> None:
        self.gradients = gradients
        self._store = store
        self.is_on_device = any(parameter.is_cuda for parameter in store.parameters)
        """Whether hooks run in autograd's threads for devices, and `backward()` waits for them."""
        self._waits_for_end: set[int] = set()
        self._task: int | None = None
        self._nested_task: int | None = None
        handles = []
        for index, parameter in enumerate(store.parameters):
            hook = _make_hook(weakref.ref(self), index)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            _owners[id(parameter)] = self
        self._handles = handles
        self._remove = weakref.finalize(self, _remove_all, handles)

    def come_last(self) -> None:
        """Run after hooks that were registered since, which may change gradients.

        Called between backward passes. In the first one nothing is averaged before its end.
        """
        for parameter, handle in zip(self._store.parameters, self._handles, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)

    def replace(self, by: torch.Tensor | None = None) -> None:
        """Others average these parameters from now on, for another optimizer: this one, say."""
        shared = 0
        if by is not None:
            shared = next(i for i, own in enumerate(self._store.parameters) if own is by)
        self.gradients.replace(
            f"the parameter {self._store.specs[shared][0]!r} was wrapped again, in another "
            "optimizer, which has replaced this one: step that one"
        )
        self._remove()
        for parameter in self._store.parameters:
            if _owners.get(id(parameter)) is self:
                del _owners[id(parameter)]

    def accumulated(self, index: int) -> None:
        """Autograd has added to gradient ``index``."""
        if _timeline.recording is None:
            self._accumulated(index)
        else:
            with _timeline.span("hook", self._store.specs[index][0]):
                self._accumulated(index)

    def _accumulated(self, index: int) -> None:
        with lock, for_caller(self.is_on_device):
            self._note(index)

    def _note(self, index: int) -> None:
        gradients = self.gradients
        task = _current_task()
        if task != self._task and task != self._nested_task:
            self._begin_backward(task)
        is_nested_task = task == self._nested_task
        is_final = not is_nested_task and index not in self._waits_for_end
        if gradients.arrived(index, is_final) and is_nested_task:
            self._waits_for_end.add(index)
            if gradients.is_launched(index):
                self._waits_for_end.update(range(len(self._store.specs)))
                raise ringdl.UsageError(
                    f"the gradient of {self._store.specs[index][0]!r} changed while it was being "
                    "averaged: it is used in a reentrant checkpoint and outside of it, but was not "
                    "in the first backward; use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )

    def finish_backward(self) -> None:
        """The outermost backward is at its end, and the pass is about to be ended."""
        self._task = None

    def _begin_backward(self, task: int) -> None:
        if is_nested():
            self._nested_task = task
            return
        self.gradients.begin_pass()
        self._task = task
        outermost.add(task, self)


def find_owner(parameter: torch.Tensor) -> Hooks | None:
    """The hooks that average this parameter already, if any."""
    return _owners.get(id(parameter))


def _make_hook(hooks: weakref.ref[Hooks], index: int) -> Callable[[torch.Tensor], None]:
    @uncompiled
    def hook(_: torch.Tensor) -> None:
        owner = hooks()
        if owner is not None:
            owner.accumulated(index)

    return hook


def _remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _refuse_unfit(name: str, parameter: torch.Tensor) -> None:
    is_averaged = parameter.is_floating_point() or parameter.dtype in _COMPLEX
    if parameter.device.type not in ("cpu", "cuda") or not is_averaged:
        raise ringdl.UsageError(
            f"the parameter {name!r} is {parameter.dtype} on {parameter.device}; "
            "ringdl.torch averages floating-point gradients on the CPU and on CUDA devices, "
            "complex64 and complex128 among them"
        )
    if (
        parameter.is_cuda
        and ringdl.size() > 1
        and not ringdl.get_communicator()._engine.has_threads
    ):
        raise ringdl.UsageError(
            f"the parameter {name!r} is on {parameter.device}, whose gradients autograd adds up in "
            "threads of its own, and this MPI does not offer MPI_THREAD_MULTIPLE: have it do so "
            "(mpi4py.rc.thread_level), or keep the model on the CPU"
        )


def _spec(name: str, parameter: torch.Tensor) -> Spec:
    """A gradient's spec for the buckets: a complex one is pairs of real numbers to them."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # None: of any
    like = torch.empty_like(parameter, dtype=dtype, device="meta")
    if like.is_complex():
        like = torch.view_as_real(like)
    return name, tuple(like.shape), str(like.dtype).removeprefix("torch."), like.stride()

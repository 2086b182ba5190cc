"""What all wrapped optimizers have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

import ringdl
from ringdl._training.options import check_passes
from ringdl.torch._compiled import uncompiled

_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""Of what torch puts around each ``step``, which calls its hooks."""


class Wrapped(torch.optim.Optimizer):
    """What a wrapped optimizer's class inherits from, besides its own. Never constructed.

    Exported as ``WrappedOptimizer``: where a type checker does not know that an optimizer was
    wrapped, ``assert isinstance(optimizer, hvd.WrappedOptimizer)`` shows it.
    """

    _ringdl_named_parameters: list[tuple[str, torch.Tensor]]
    _ringdl_frozen: list[tuple[str, torch.Tensor]]
    _ringdl_hooks: list[torch.utils.hooks.RemovableHandle]
    _ringdl_following: Any = None

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter: MPI training scripts read it here."""
        return {parameter: name for name, parameter in self._ringdl_named_parameters}

    if TYPE_CHECKING:  # what the kinds have

        def synchronize(self) -> None: ...
        def replan(self) -> None: ...
        def set_backward_passes_per_step(self, passes: int) -> None: ...
        def skip_synchronize(self) -> AbstractContextManager[None]: ...
        def no_sync(self) -> AbstractContextManager[None]: ...

    def _ringdl_unwrap(self) -> None:
        """The optimizer is about to be bare again."""

    def _ringdl_refuse_unfrozen(self, what: str) -> None:
        """Refuse a gradient of a parameter that was frozen when the optimizer was wrapped."""
        for name, parameter in self._ringdl_frozen:
            if parameter.grad is not None:
                raise ringdl.UsageError(
                    f"the parameter {name!r} has a gradient, but did not require one when the "
                    f"optimizer was wrapped, so it is not {what}; on all ranks, wrap the optimizer "
                    "again after parameters were unfrozen"
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is a bare optimizer."""
        return _make_bare, (type(self).__bases__[1],), self.__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what ranks exchange is agreed once, when the optimizer is wrapped."""
        raise ringdl.UsageError(
            "parameters cannot be added to a wrapped optimizer; add them before wrapping it"
        )


class Unaveraged(Wrapped):
    """Gradients are each rank's own: methods that would average them do nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def replan(self) -> None:
        """Nothing."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: gradients are used when ``step()`` is called."""
        check_passes(passes)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Nothing."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: ``backward()`` never communicates."""
        yield


class Alone(Unaveraged):
    """For a rank that is not in the process set: it steps on its own gradients."""


def wrap(
    optimizer: torch.optim.Optimizer,
    kind: type[Wrapped],
    named: list[tuple[str, torch.Tensor]],
    before_step: Callable[..., Any] | None = None,
    after_step: Callable[..., Any] | None = None,
) -> None:
    """Change the class of an optimizer to a subclass of its own and `kind`, under the same name.

    Args:
        optimizer: a bare one.
        kind: what it becomes.
        named: its parameters.
        before_step: a hook of each step.
        after_step: likewise.
    """
    optimizer.__class__ = type(type(optimizer).__name__, (kind, type(optimizer)), {})
    assert isinstance(optimizer, Wrapped)
    optimizer._patch_step_function()  # one that has not called its base's constructor has no hooks
    optimizer._ringdl_named_parameters = named
    optimizer._ringdl_frozen = [pair for pair in named if not pair[1].requires_grad]
    optimizer._ringdl_hooks = []
    if before_step is not None:
        hook = _in_outermost_step(before_step)
        optimizer._ringdl_hooks.append(optimizer.register_step_pre_hook(hook))
    if after_step is not None:
        hook = _in_outermost_step(after_step)
        optimizer._ringdl_hooks.append(optimizer.register_step_post_hook(hook))


def _in_outermost_step(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, but not for a ``super().step()`` within ``step()``.

    torch runs the hooks of an optimizer around the ``step`` of each class of which one was made.
    """

    @uncompiled
    def only_outermost(optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        steps, frame = 0, sys._getframe(1)
        while frame is not None and steps < 2:
            if frame.f_code is _STEP_CODE and frame.f_locals["args"][:1] == (optimizer,):
                steps += 1
            frame = frame.f_back  # type: ignore[assignment]
        return None if steps > 1 else hook(optimizer, *args)

    return only_outermost


def unwrap(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer bare again, if it was wrapped."""
    if not isinstance(optimizer, Wrapped):
        return
    optimizer._ringdl_unwrap()
    for hook in optimizer._ringdl_hooks:
        hook.remove()
    for name in [name for name in vars(optimizer) if name.startswith("_ringdl_")]:
        delattr(optimizer, name)
    optimizer.__class__ = type(optimizer).__bases__[1]


def _make_bare(bare_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return bare_class.__new__(bare_class)

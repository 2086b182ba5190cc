"""What all wrapped optimizers have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ringdl


class Wrapped(torch.optim.Optimizer):
    """What a wrapped optimizer's class inherits from, besides its own. Never constructed."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is a bare optimizer."""
        return _make_bare, (type(self).__bases__[1],), self.__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what ranks exchange is agreed once, when the optimizer is wrapped."""
        raise ringdl.UsageError(
            "parameters cannot be added to a wrapped optimizer; add them before wrapping it"
        )


class Unaveraged(Wrapped):
    """Gradients are each rank's own: what is about averaging them does nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def replan(self) -> None:
        """Nothing."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: gradients are used when ``step()`` is called."""
        refuse_passes(passes)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Nothing."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: ``backward()`` never communicates."""
        yield


class Alone(Unaveraged):
    """Of a rank that is not in the process set: it steps on its own gradients."""


def refuse_passes(passes: int) -> None:
    """Of ``backward_passes_per_step``.

    Raises:
        UsageError: it is not positive.
    """
    if passes < 1:
        raise ringdl.UsageError(f"backward_passes_per_step must be at least 1, not {passes}")


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapped]) -> None:
    """Change the class of an optimizer to a subclass of its own and `kind`, under the same name."""
    optimizer.__class__ = type(type(optimizer).__name__, (kind, type(optimizer)), {})


def _make_bare(bare_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return bare_class.__new__(bare_class)

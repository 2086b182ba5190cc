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


class Alone(Wrapped):
    """Of a rank that is not in the process set: it steps on its own gradients."""

    def synchronize(self) -> None:
        """Nothing."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Nothing."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing."""
        yield


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapped]) -> None:
    """Change the class of an optimizer to a subclass of its own and `kind`, under the same name."""
    optimizer.__class__ = type(type(optimizer).__name__, (kind, type(optimizer)), {})


def _make_bare(bare_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return bare_class.__new__(bare_class)

"""DistributedOptimizer(op=Adasum): what optimizers change is combined, not gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import _GeneratorContextManager
from typing import Any

import torch

import ringdl
from ringdl._joining import starts_over
from ringdl._reductions import CompressionName
from ringdl._training import replicas
from ringdl.torch._compiled import uncompiled
from ringdl.torch._state import HOW_TO_MEND, replicas_of
from ringdl.torch._wrapped import Unaveraged, wrap

NamedParameters = list[tuple[str, torch.Tensor]]


class AdasumDistributed(Unaveraged):
    """Combines what steps have changed.

    Each rank steps on its own gradients. Then, for each parameter, what the ranks have changed is
    combined by `ringdl.Adasum` and added to what the parameter was. So gradients are each rank's
    own: clip them before ``step()`` without any call, and do without GradScaler, which would make
    ranks skip steps that others make.
    """

    _ringdl_changes: Changes

    def skip_synchronize(self) -> _GeneratorContextManager[None]:
        """Refused on several ranks: they would train models of their own."""
        if self._ringdl_changes.communicator.size == 1:
            return super().skip_synchronize()
        raise ringdl.UsageError(
            "with op=Adasum step() combines what each rank's step has changed, so it cannot be "
            "skipped; clip gradients before step(), without skip_synchronize()"
        )


class Changes:
    """What steps of one optimizer change. Collective: ranks construct in the same order.

    Args:
        named: the parameters, in the same order on every rank.
        compression: 16-bit floats that changes of float32 parameters travel as.
        communicator: the ranks.
        check_replicas: whether the first step compares the parameters of all ranks.
    """

    def __init__(
        self,
        named: NamedParameters,
        compression: CompressionName | None,
        communicator: ringdl.Communicator,
        check_replicas: bool = True,
    ) -> None:
        self.named = named
        self._trained = [pair for pair in named if pair[1].requires_grad]
        self._checks_replicas = check_replicas
        self._wire = None if compression is None else getattr(torch, compression)
        self.communicator = communicator
        self._epoch = communicator.epoch
        self._key = self._new_key()
        self._before: Sequence[torch.Tensor] | None = None
        self._are_replicas_checked = not check_replicas
        starts_over(self)

    def begin(self) -> None:
        """The optimizer is going to step."""
        if self._epoch != self.communicator.epoch:
            self._epoch = self.communicator.epoch
            self._key = self._new_key()
            self.start_over()
        if not self._are_replicas_checked:
            name = f"{self._key}.replicas"
            replicas.check([*replicas_of(self.named)], self.communicator, name, HOW_TO_MEND)
            self._are_replicas_checked = True
        self._before = [parameter.detach().clone() for _, parameter in self._trained]

    @torch.no_grad()
    def end(self) -> None:
        """The optimizer has stepped. Collective."""
        if self._before is None:
            return
        before, self._before = self._before, None
        pairs = [*zip(before, (parameter for _, parameter in self._trained), strict=True)]
        changes = [self._narrow(parameter - old) for old, parameter in pairs]
        combined = [torch.view_as_real(each) if each.is_complex() else each for each in changes]
        was_checked, self._are_replicas_checked = self._are_replicas_checked, False
        self.communicator.grouped_allreduce_(combined, ringdl.Adasum, self._key)
        self._are_replicas_checked = was_checked
        for (old, parameter), change in zip(pairs, changes, strict=True):
            parameter.copy_(old + change.to(parameter.dtype))

    def start_over(self) -> None:
        """Compare the parameters of all ranks at the next step."""
        self._are_replicas_checked = not self._checks_replicas

    def _new_key(self) -> str:
        return f"ringdl.torch.adasum.{self.communicator._count('adasum') - 1}"

    def _narrow(self, change: torch.Tensor) -> torch.Tensor:
        is_narrowed = self._wire is not None and change.dtype == torch.float32
        return change.to(self._wire) if is_narrowed else change


def combine_steps(optimizer: torch.optim.Optimizer, changes: Changes) -> None:
    """Change the optimizer's class, and combine in each ``step()`` from now on."""
    optimizer._ringdl_changes = changes  # type: ignore[attr-defined]
    wrap(optimizer, AdasumDistributed, changes.named, _before_step, _after_step)


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert isinstance(optimizer, AdasumDistributed)
    optimizer._ringdl_refuse_unfrozen("combined")
    optimizer._ringdl_changes.begin()


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert isinstance(optimizer, AdasumDistributed)
    optimizer._ringdl_changes.end()

"""Keras on PyTorch: gradients are averaged in ``backward()``, as those of `ringdl.torch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import ringdl
from ringdl._training import Gradients, agreeing
from ringdl._training.compression import wire_of
from ringdl._training.process_sets import communicator_of
from ringdl.keras._averaging import HOW_TO_MEND, HOW_TO_WRAP, Options
from ringdl.torch._gradients import Hooks, ParameterGradients, find_owner
from ringdl.torch._state import replicas_of


class _Store(ParameterGradients):
    how_to_wrap = HOW_TO_WRAP


class BackendAveraging:
    """See `Averaging`. In the first step, nothing is averaged before ``backward()`` has ended."""

    def __init__(self, named: Sequence[tuple[str, Any]], options: Options) -> None:
        communicator = communicator_of(options.process_set)
        self._named: list[tuple[str, torch.Tensor]] = [
            (name, variable.value) for name, variable in named
        ]
        found = (find_owner(parameter) for _, parameter in self._named)
        owners = {owner for owner in found if owner is not None}
        with agreeing(communicator):
            if owners and options.op == ringdl.Sum:
                raise ringdl.UsageError(
                    "these variables are trained by another wrapped optimizer, too, which has "
                    "summed their gradients already; delete it before compile(), or use op=Average"
                )
            store = _Store(self._named, options.sparse_as_dense)
            wire = wire_of(options.compression)
        for owner in owners:
            owner.replace()
        self._is_sum = options.op == ringdl.Sum
        self._gradients = Gradients(store, options.op, wire, 1, communicator, options.predivisor)
        self._hooks = Hooks(self._gradients, store)

    def average(self, gradients: Sequence[Any], values: Sequence[Any] | None) -> list[Any]:
        """See `Averaging`."""
        del values
        changed = ""
        for (name, parameter), gradient in zip(self._named, gradients, strict=True):
            if gradient is not parameter.grad:
                parameter.grad = gradient
                changed = changed or name
        if changed and self._gradients.is_averaged:  # since backward()
            if self._is_sum:
                raise ringdl.UsageError(
                    f"the gradient of {changed} was changed after backward(), which has summed it "
                    "already; use op=Average, for which it is averaged again"
                )
            self._gradients.expect_round()
        self._gradients.synchronize()
        self._gradients.check_replicas(replicas_of(self._named), HOW_TO_MEND)
        return [parameter.grad for _, parameter in self._named]

    def finish_step(self) -> None:
        """See `Averaging`."""
        self._gradients.finish_step()

"""Optimizers that somebody has forgotten to wrap."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ringdl
from ringdl.torch._compiled import uncompiled
from ringdl.torch._wrapped import Wrapped

_replicated: dict[int, StorageWeakRef] = {}
"""The memory of parameters that were broadcast, by the number that it has while it lives."""
_works: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
"""How many works had ended at the last step of an optimizer that is not wrapped."""
_is_watching = False


def watch(parameters: Iterable[torch.Tensor]) -> None:
    """Warn if an optimizer steps on these twice, and nothing was communicated in between.

    They are the same on all ranks now, and would not stay so. A script that averages gradients by
    hand is left alone.
    """
    global _is_watching
    dead = [number for number, memory in _replicated.items() if memory.expired()]  # type: ignore[no-untyped-call]
    for number in dead:
        del _replicated[number]
    for tensor in parameters:
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        _replicated[memory.cdata] = memory
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_look)


@uncompiled
def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _replicated or isinstance(optimizer, Wrapped) or not ringdl.is_initialized():
        return
    replicated = {number for number, memory in _replicated.items() if not memory.expired()}  # type: ignore[no-untyped-call]
    if not any(
        parameter.untyped_storage()._cdata in replicated
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        return
    works = ringdl.stats()["works"]
    if _works.get(optimizer) == works:
        _replicated.clear()  # once is enough
        warnings.warn(
            f"this {type(optimizer).__name__} has stepped twice on parameters that were broadcast, "
            "and no gradients were averaged in between, so the ranks train models of their own; "
            "wrap it: optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
            RuntimeWarning,
            stacklevel=3,
        )
    _works[optimizer] = works

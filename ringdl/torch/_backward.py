"""The outermost backward in progress: what it has touched is averaged at its end."""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import torch

from ringdl._submitters import for_caller
from ringdl._training import end_passes
from ringdl.torch._compiled import uncompiled

if TYPE_CHECKING:
    from ringdl.torch._gradients import Hooks

_BACKWARD_CODES = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_FUNCTION_CODE = torch.autograd.function.BackwardCFunction.apply.__code__
"""Of what autograd calls the backward of a function that is written in Python by."""

lock = threading.RLock()
"""Held by hooks: for each device that parameters lie on, autograd has a thread of its own."""


def is_nested() -> bool:
    """Whether the Python stack holds a backward inside another one.

    A thread of autograd's for a device has the outer one below its stack: there, the inner one is
    in a function that autograd has called.
    """
    is_inside = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_inside and (frame.f_code in _BACKWARD_CODES or frame.f_code is _FUNCTION_CODE):
            return True
        is_inside = is_inside or frame.f_code in _BACKWARD_CODES
        frame = frame.f_back
    return False


_MOST_TASKS = 16
"""Backward passes at once. Those that fail tell nobody, and are forgotten when others are more."""


class _Outermost:
    """The outermost backward in progress of each thread, and the gradients that it has touched.

    There is one callback for all optimizers: see `ringdl._training.end_passes`.
    """

    def __init__(self) -> None:
        self.touched: dict[int, list[Hooks]] = {}
        """By the number of autograd's task."""

    def add(self, task: int, hooks: Hooks) -> None:
        """The caller holds `lock`."""
        if task not in self.touched:
            if len(self.touched) == _MOST_TASKS:
                del self.touched[min(self.touched)]
            self.touched[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        self.touched[task].append(hooks)

    @uncompiled
    def _end(self, task: int) -> None:
        with lock:
            touched = self.touched.pop(task, [])
            for hooks in touched:
                hooks.finish_backward()
        with for_caller(any(hooks.is_on_device for hooks in touched)):
            end_passes(hooks.gradients for hooks in touched)


outermost = _Outermost()

"""The outermost backward in progress: what it has touched is averaged at its end."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

import torch

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


class _Outermost:
    """The outermost backward in progress, and the gradients that it has touched so far.

    There is one callback for all optimizers: see `ringdl._training.end_passes`.
    """

    def __init__(self) -> None:
        self.task = -1
        self.touched: list[Hooks] = []

    def add(self, task: int, hooks: Hooks) -> None:
        if task != self.task:
            self.task, self.touched = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self.touched.append(hooks)

    @uncompiled
    def _end(self) -> None:
        self.task, touched, self.touched = -1, self.touched, []
        for hooks in touched:
            hooks.finish_backward()
        end_passes(hooks.gradients for hooks in touched)


outermost = _Outermost()

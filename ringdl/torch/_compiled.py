"""torch.compile: ringdl's code runs uncompiled, between the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch

import ringdl

_OURS = str(Path(ringdl.__file__).parent)
"""Code elsewhere (a context manager's) is not ours to mark."""
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def uncompiled(function: AnyFunction) -> AnyFunction:
    """Have torch.compile end its graph before this function, and leave all that it calls alone.

    As `torch.compiler.disable`, whose wrapper costs a microsecond per call and whose import takes a
    second: here the function itself is marked, in the two places that Dynamo checks. The mark on
    the code, which closures of one function share, is for frames that begin between two graphs.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "collectives run between graphs"  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def leave_uncompiled(*namespaces: Any, names: Iterable[str] | None = None) -> None:
    """The same for the functions of modules and classes.

    Args:
        namespaces: where they are.
        names: which of them; by default all that are defined there.
    """
    for namespace in namespaces:
        for name in [*vars(namespace)] if names is None else names:
            member = vars(namespace).get(name)
            if isinstance(member, staticmethod):
                member = member.__func__
            if isinstance(member, FunctionType) and member.__code__.co_filename.startswith(_OURS):
                uncompiled(member)

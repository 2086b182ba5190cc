"""NVIDIA's NCCL: where it may be, and which version was found. The engine calls it."""

from __future__ import annotations

from functools import cache

from ringdl import _engine, _nvidia


@cache
def look() -> None:
    """Let the engine find the library of pip's wheel, if it needs one. Loads nothing."""
    _engine.look_for_nccl_at(list(map(str, _nvidia.libraries("libnccl.so.2"))))


def number() -> int:
    """The library's version, loaded now: 22809 is 2.28.9. 0 if there is none."""
    look()
    return _engine.nccl()[0]


def version() -> tuple[str, str]:
    """The same in words; empty if there is none, and then why."""
    its = number()
    if its == 0:
        return "", _engine.nccl()[1]
    return f"{its // 10000}.{its // 100 % 100}.{its % 100}", ""

"""What rank 0 reads and writes for all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

import ringdl

Result = TypeVar("Result")


def on_rank_0(action: Callable[[], Result], problem: str, name: str) -> Result:
    """Run an action on rank 0 and return its result on all ranks. Collective.

    Args:
        action: called there alone; returns what can be pickled.
        problem: what errors say rank 0 cannot do.
        name: what the broadcast is matched by.

    Raises:
        UsageError: on every rank, if the action raises.
    """
    result: Result | ringdl.UsageError | None = None
    if ringdl.rank() == 0:
        try:
            result = action()
        except Exception as error:  # the others wait for an answer
            result = ringdl.UsageError(f"rank 0 {problem}: {error}")
    result = ringdl.get_communicator().broadcast_object(result, name=name)
    if isinstance(result, ringdl.UsageError):
        raise result
    return result


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Write a file beside its place and move it there, so that it never exists in part."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:  # never another's, by a link that somebody has put there
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
        _sync(target.parent)
    finally:
        beside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have the name last, too, if the machine fails."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

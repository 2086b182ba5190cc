"""Files that never exist in part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
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

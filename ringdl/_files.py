"""Files that never exist in part, and of commands that write their figures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ringdl._errors import UsageError


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


def write_text(path: Path, text: str) -> None:
    """The same, of what a command was told to write.

    A link stays one, and what is no file stays what it is.

    Raises:
        UsageError: it cannot be written; the file that was there still is.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
        else:
            write_whole(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def _sync(folder: Path) -> None:
    """Have the name last, too, if the machine fails."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints that rank 0 writes and reads, for any number of ranks."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ringdl


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Have rank 0 write what ``torch.save`` takes. Collective: returns once it is there.

    The file is written beside its place and then moved there: a job that ends meanwhile leaves the
    checkpoint before it.

    Args:
        state: as rank 0 has it; what others pass is ignored.
        path: where rank 0 writes.

    Raises:
        UsageError: on every rank, if it cannot be written.
    """

    def write() -> None:
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    _on_rank_0(write, f"cannot write the checkpoint {os.fspath(path)!r}")


def load(path: str | os.PathLike[str], *, weights_only: bool = True) -> Any:
    """What rank 0 reads from a checkpoint, on all ranks; they need not see the file. Collective.

    Args:
        path: where rank 0 reads.
        weights_only: as in ``torch.load``.

    Raises:
        UsageError: on every rank, if it cannot be read.
    """
    content = _on_rank_0(
        lambda: Path(path).read_bytes(), f"cannot read the checkpoint {os.fspath(path)!r}"
    )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)


def _on_rank_0(action: Callable[[], Any], problem: str) -> Any:
    """What it returns there, on all ranks."""
    result: Any = None
    if ringdl.rank() == 0:
        try:
            result = action()
        except Exception as error:  # the others wait for an answer
            result = ringdl.UsageError(f"rank 0 {problem}: {error}")
    result = ringdl.get_communicator().broadcast_object(result, name="ringdl.torch.checkpoint")
    if isinstance(result, ringdl.UsageError):
        raise result
    return result

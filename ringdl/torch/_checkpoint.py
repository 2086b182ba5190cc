"""Checkpoints that rank 0 writes and reads, for any number of ranks."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from ringdl._files import write_whole
from ringdl._training.files import on_rank_0

_NAME = "ringdl.torch.checkpoint"


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Have rank 0 write what ``torch.save`` takes. Collective: returns once it is there.

    The file is written beside its place and then moved there: a job that ends meanwhile keeps the
    previous checkpoint.

    Args:
        state: as rank 0 has it; what others pass is ignored.
        path: where rank 0 writes.

    Raises:
        UsageError: on every rank, if it cannot be written.
    """
    on_rank_0(
        lambda: write_whole(path, lambda file: torch.save(state, file)),
        f"cannot write the checkpoint {os.fspath(path)!r}",
        _NAME,
    )


def load(path: str | os.PathLike[str], *, weights_only: bool = True) -> Any:
    """What rank 0 reads from a checkpoint, on all ranks; they need not see the file. Collective.

    Args:
        path: where rank 0 reads.
        weights_only: as in ``torch.load``.

    Raises:
        UsageError: on every rank, if it cannot be read.
    """
    content = on_rank_0(
        lambda: Path(path).read_bytes(), f"cannot read the checkpoint {os.fspath(path)!r}", _NAME
    )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)

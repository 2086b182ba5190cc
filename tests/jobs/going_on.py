"""What elastic jobs tell when they go on, and where they write the commit."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ringdl


def tell(
    number: int, where: str, failed_at: float, suffix: str, write: Callable[[Path], object]
) -> None:
    """Rank `number`, as it was at the start, goes on; rank 0 writes, if the test wants that."""
    size, seconds = ringdl.size(), time.monotonic() - failed_at
    sys.stdout.write(
        f"rank {number} goes on as {ringdl.rank()} of {size} {where} after {seconds:.2f} s\n"
    )
    sys.stdout.flush()
    folder = os.environ.get("ELASTIC_FOLDER")
    if folder is not None and ringdl.rank() == 0:
        write(Path(folder, f"{size}{suffix}"))

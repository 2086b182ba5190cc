"""What elastic jobs tell when they go on, and where they write the commit."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ringdl
from ringdl import _newcomer

went_on_at = time.monotonic()
"""When this rank last did; its start, at first."""


def number() -> int | str:
    """This rank's, as it was at the start; "new" in the place of one that has failed."""
    return ringdl.rank() if _newcomer.has_joined() else "new"


def tell_of_training() -> None:
    """By a file of this rank, if the test wants that."""
    folder = os.environ.get("ELASTIC_FOLDER")
    if folder is not None:
        Path(folder, f"{number()}.trains").touch()


def wait(at: int, commit: Callable[[], object]) -> None:
    """Until there are as many ranks as ELASTIC_WAITS, "step:size,...", says of this step."""
    waits = dict(each.split(":") for each in os.environ.get("ELASTIC_WAITS", "").split(",") if each)
    until = time.monotonic() + 60
    while str(at) in waits and ringdl.size() != int(waits[str(at)]):
        assert time.monotonic() < until, "nobody has joined for too long"
        time.sleep(0.01)
        commit()


def kill() -> None:
    """This rank; the name of a file says when."""
    folder = os.environ.get("ELASTIC_FOLDER")
    if folder is not None:
        Path(folder, f"{time.monotonic()}.killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def tell(
    number: int | str, where: str, failed_at: float, suffix: str, write: Callable[[Path], object]
) -> None:
    """Rank `number`, as it was at the start, goes on; rank 0 writes, if the test wants that.

    Seconds count from the first death since this rank last went on, where a file tells of one: its
    first step may have waited long before that, for ranks that still imported PyTorch.
    """
    global went_on_at
    folder, size, now = os.environ.get("ELASTIC_FOLDER"), ringdl.size(), time.monotonic()
    killed = Path(folder).glob("*.killed") if folder is not None else ()
    deaths = [death for path in killed if (death := float(path.stem)) > went_on_at]
    seconds, went_on_at = now - min(deaths, default=failed_at), now
    sys.stdout.write(
        f"rank {number} goes on as {ringdl.rank()} of {size} {where} after {seconds:.2f} s\n"
    )
    sys.stdout.flush()
    if folder is not None and ringdl.rank() == 0:
        write(Path(folder, f"{size}{suffix}"))

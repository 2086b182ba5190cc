"""The flight recorder: a file per rank with the last works that it has begun.

The engine writes there as they begin and end (csrc/engine/flight_recorder.h), in memory that is the
file's: so a rank that is killed leaves what it has done, and nobody has to ask one that hangs.
`ringdl._flight_records` reads the files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import traceback
import warnings
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ringdl._errors import Error
from ringdl._version import __version__

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

_recorded: weakref.ref[Communicator] | None = None
"""That whose works are recorded."""


def start(communicator: Communicator, directory: str) -> None:
    """Record this rank's works from now on, in a new folder of the directory. Collective.

    A rank that cannot write there warns, and records nothing.

    Args:
        communicator: of all ranks.
        directory: rank 0's counts, and must be meant by its path on all hosts.
    """
    global _recorded
    name = f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S.%f}-{secrets.token_hex(3)}"  # the newest is last
    folder = communicator.broadcast_object(
        os.path.join(os.path.abspath(directory), name), name="ringdl.flights"
    )
    rank = communicator.rank
    try:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank{rank}.flight")
        communicator._engine.start_flight_recorder(path, socket.gethostname(), __version__)
    except (OSError, Error) as error:
        warnings.warn(
            f"rank {rank} keeps no flight record: {error}. Have RINGDL_FLIGHT_RECORDER name a "
            "directory that all ranks can write to",
            RuntimeWarning,
            stacklevel=6,
        )
        return
    _recorded = weakref.ref(communicator)


def note_end(error: BaseException) -> None:
    """Have the record of this process say by what error it ends. Never raises."""
    communicator = None if _recorded is None else _recorded()
    if communicator is None:
        return
    with contextlib.suppress(Exception):  # whatever the error's own text does
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        text = f"{type(error).__name__}{place}: {error}"
        communicator._engine.note_end(text.encode(errors="backslashreplace").decode())

"""Children of a rank: they inherit the launcher's variables, and must not take the rank's place.

A rank marks its environment when `init` begins. A process that finds there the mark of another
living one was started by it, in whatever way: `subprocess`, `fork`, or spawn and forkserver of
multiprocessing. What a launcher starts inside a rank, as a job of its own, gets variables of its
own, and is no child. Linux only, as /proc is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ringdl._errors import UsageError
from ringdl._settings import RANK_PROCESS

_GIVEN_BY_LAUNCHERS = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid"),
    *("PMI_RANK", "PMI_ID", "PMI_JOBID", "PMI_PORT", "PALS_APID", "PALS_RANKID"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
)
"""Together they identify a process that a launcher started. No rank sets them."""

_GIVEN_BY_TORCHRUN = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""The same where torchrun, or none of the others, is at work; elsewhere ranks set the last ones."""

_PLACE = ("rank", "size", "local_rank", "local_size", "host_rank", "host_count")


@dataclass(frozen=True)
class Parent:
    """A rank that has started this process.

    Attributes:
        process: its process id.
        place: its rank, size, local rank, local size, host rank and number of hosts; empty while
            its `init` has not returned.
    """

    process: int
    place: tuple[int, ...]

    def __str__(self) -> str:
        """For messages: ``rank 1 (process 4242)``."""
        return f"{f'rank {self.place[0]}' if self.place else 'a rank'} (process {self.process})"


class Child:
    """What `init` returns while multiprocessing imports the script in a child of a rank.

    It answers where the parent is among the ranks, as a communicator does in a forked child. All
    else raises UsageError.
    """

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self.__dict__.update(zip(_PLACE, parent.place, strict=True))

    def shutdown(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"ringdl was called in a child process of {self._parent}, which is no rank: call it in "
            "the ranks alone, in a script below `if __name__ == '__main__':`"
        )


def mark(environ: MutableMapping[str, str], communicator: Any = None) -> None:
    """Mark this process as a rank.

    The mark is its process, when that started, a digest of its launcher's variables, and its place.

    Args:
        environ: `os.environ`, which children inherit.
        communicator: the one of all ranks, once it is there.
    """
    process = os.getpid()
    place = () if communicator is None else (getattr(communicator, name) for name in _PLACE)
    words = (process, _start_of(process), _digest(environ), *place)
    environ[RANK_PROCESS] = " ".join(map(str, words))


def find_parent(environ: Mapping[str, str]) -> Parent | None:
    """The rank that has started this process, if one has and no launcher since."""
    try:
        process, start, digest, *place = environ.get(RANK_PROCESS, "").split()
        parent = Parent(int(process), tuple(map(int, place)))
    except ValueError:
        return None
    if parent.process == os.getpid() or str(_start_of(parent.process)) != start:
        return None
    if digest != _digest(environ) or _is_of_nested_hydra(environ, parent.process):
        return None
    return parent


def stand_in(parent: Parent) -> Child:
    """What `init` returns in a child.

    Raises:
        UsageError: the child calls `init` itself, and not because multiprocessing imports the
            parent's script there.
    """
    if not _is_prepared_by_multiprocessing() or not parent.place:
        refuse(parent)
    return Child(parent)


def _is_prepared_by_multiprocessing() -> bool:
    """Whether spawn or forkserver is importing or unpickling what it will run later.

    What it runs, it runs in a method of a Process.
    """
    import inspect

    modules = set()
    frame = inspect.currentframe()
    while frame is not None:
        modules.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    starts = {"multiprocessing.spawn", "multiprocessing.forkserver"}
    return bool(starts & modules) and "multiprocessing.process" not in modules


def refuse(parent: Parent | None) -> None:
    """Raise UsageError if there is a parent."""
    if parent is not None:
        raise UsageError(
            f"this process is a child of {parent} and cannot be a rank: call ringdl.init() in the "
            "processes alone that the launcher has started, or, if it is to be alone, start this "
            "one without the launcher's variables (docs/sharp-bits.md)"
        )


def _digest(environ: Mapping[str, str]) -> str:
    import hashlib

    names: tuple[str, ...] = _GIVEN_BY_LAUNCHERS
    if "TORCHELASTIC_RUN_ID" in environ or not any(name in environ for name in names):
        names += _GIVEN_BY_TORCHRUN
    text = "\n".join(environ.get(name, "") for name in names)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_of_nested_hydra(environ: Mapping[str, str], ancestor: int) -> bool:
    """Whether Hydra has started this process inside the rank `ancestor`.

    Its variables are the same in every job. But PMI_FD is a socket whose other end belongs to the
    process of Hydra's that started this one.
    """
    import socket
    import struct

    try:
        with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as pmi:
            if pmi.family != socket.AF_UNIX:
                return False
            credentials = pmi.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except (KeyError, ValueError, OSError):
        return False
    return struct.unpack("3i", credentials)[0] in _between(os.getppid(), ancestor)


def _between(process: int, ancestor: int) -> Iterator[int]:
    """A process and those that it descends from, up to an ancestor of it, without that."""
    while process not in (0, ancestor):
        yield process
        fields = _fields_of(process)
        process = int(fields[1]) if fields else 0


def _start_of(process: int) -> int | None:
    """When it started, in clock ticks since the machine did; None if there is no such process."""
    fields = _fields_of(process)
    return int(fields[19]) if fields else None


def _fields_of(process: int) -> list[str]:
    """What /proc says of it, from its state on; the parent is number 1, the start number 19."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []

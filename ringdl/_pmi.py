"""How a rank ends under MPICH 4.0 over UCX, where MPI_Finalize may never return over a network.

(https://github.com/openucx/ucx/issues/8738 is alike: endpoints that no rank moves any more.)
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Mapping

from ringdl._launch import Launcher

_ANSWER_SECONDS = 5.0

_SHARED_MEMORY = {"all", "shm", "sm", "mm", "posix", "sysv", "xpmem"}
"""What in UCX_TLS lets the ranks of one host do without a network."""


def find_descriptor(
    launcher: Launcher | None, library: str, environ: Mapping[str, str]
) -> int | None:
    """Find the socket to the launcher, where a rank should end without MPI_Finalize.

    Args:
        launcher: what started this process.
        library: what ``MPI_Get_library_version`` says.
        environ: this process's environment.

    Returns:
        its descriptor; None where MPI_Finalize returns.
    """
    # Where settings of Intel MPI are in the environment, Hydra is taken for Intel's.
    if launcher is None or launcher.name not in ("Hydra", "Intel MPI", "Slurm"):
        return None
    if launcher.local_size is None and launcher.name != "Slurm":  # it tells one host
        return None
    uses_network = _SHARED_MEMORY.isdisjoint(environ.get("UCX_TLS", "all").split(","))
    if launcher.local_size == launcher.size and not uses_network:
        return None
    if not re.match(r"MPICH Version:\s*4\.0\b", library) or "ch4:ucx" not in library:
        return None
    text = environ.get("PMI_FD", "")
    return int(text) if text.isdecimal() else None


def leave(descriptor: int) -> bool:
    """Tell the launcher that this rank needs it no more, as MPI_Finalize does in the end.

    Whoever ends without that counts as dead, and the launcher kills the others. The protocol is
    PMI-1, of which this is the last message and its answer.

    Returns:
        whether the launcher has answered.
    """
    answer = b""
    try:
        os.write(descriptor, b"cmd=finalize\n")
        while not answer.endswith(b"\n"):
            if not select.select([descriptor], [], [], _ANSWER_SECONDS)[0]:
                return False
            part = os.read(descriptor, 256)
            if not part:
                return False
            answer += part
    except OSError:
        return False
    return answer.split()[:1] == [b"cmd=finalize_ack"]  # Slurm adds rc=0

"""Memory that the ranks of one host share: opened, announced, and mapped, all at `init`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdl._communicator import Communicator
from ringdl._engine import Reduction
from ringdl._errors import Error

_TEXT_BYTES = 512


def share_memory(communicator: Communicator, hosts: Sequence[int]) -> str | None:
    """Let the ranks of each host reach one another's memory. Collective, on all ranks.

    Each rank opens a segment, announces where it is, and maps those of its host. Where a rank of a
    host cannot, none of that host does: processes in containers of their own cannot see each other,
    whatever MPI says. A rank that is alone on its host needs none.

    Args:
        communicator: one of all ranks; its `memory_hosts` say who shares memory afterwards.
        hosts: the number of each rank's host.

    Returns:
        What rank 0 should warn of; None on the others, or if all is well.
    """
    import numpy as np

    engine, rank, size = communicator._engine, communicator.rank, communicator.size
    local = [other for other in range(size) if hosts[other] == hosts[rank]]
    own, reason = (0, 0, 0, 0), ""
    if len(local) > 1:
        try:
            own = engine.open_window(len(local))
        except Error as error:
            reason = str(error)
    mine = np.array([own], np.uint64).view(np.int64)
    addresses = communicator.allgather(mine, "ringdl.window").view(np.uint64).tolist()
    if own[2] > 0:
        reason = _reach(engine, rank, {other: addresses[other] for other in local})
    failed = np.array([reason != ""])
    reasons: dict[int, str] = {}
    if communicator.allreduce(failed, Reduction.Max, "ringdl.window")[0]:
        reasons = _exchange(communicator, reason)
    apart = {hosts[failing] for failing in reasons}
    if len(local) == 1 or hosts[rank] in apart:
        engine.close_window()
    memory_hosts = [size + r if host in apart else host for r, host in enumerate(hosts)]
    if len(set(memory_hosts)) < size:
        engine.use_window(memory_hosts)
        communicator._shared.memory_hosts = memory_hosts
    return _warning(hosts, reasons) if reasons and rank == 0 else None


def _reach(engine: Any, rank: int, addresses: dict[int, Sequence[int]]) -> str:
    """Map the segments of this host's ranks; returns why that is not possible, if so."""
    import os

    for other, address in addresses.items():
        if other == rank or address[2] == 0 or engine.reach(other, address):
            continue  # a rank without a segment says so itself
        process, descriptor = address[:2]
        try:
            os.stat(f"/proc/{process}/fd/{descriptor}")
        except OSError as error:
            return f"it cannot see the process of rank {other} ({error}): is that in a container?"
        return f"it cannot map the memory of rank {other}: is ulimit -v too low?"
    return ""


def _exchange(communicator: Communicator, reason: str) -> dict[int, str]:
    """The reasons of all ranks that have one, with their hosts' names. Collective."""
    import socket

    import numpy as np

    text = f"rank {communicator.rank} on {socket.gethostname()}: {reason}" if reason else ""
    row = np.zeros((1, _TEXT_BYTES), np.uint8)
    encoded = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    row[0, : encoded.size] = encoded
    rows = communicator.allgather(row, "ringdl.window.reasons")
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
    return {rank: text for rank, text in enumerate(texts) if text}


def _warning(hosts: Sequence[int], reasons: dict[int, str]) -> str:
    """One sentence on the first host that shares no memory, and how many there are."""
    first, reason = next(iter(reasons.items()))
    ranks = [str(rank) for rank, host in enumerate(hosts) if host == hosts[first]]
    count = len({hosts[rank] for rank in reasons})
    others = "" if count == 1 else f" (and so do those of {count - 1} more hosts)"
    return (
        f"the ranks {', '.join(ranks)} share no memory and exchange messages, which takes longer"
        f"{others}: {reason}. If that is as it should be, RINGDL_SHARED_MEMORY=0 says so"
    )

"""How ranks that no MPI has started find each other: through the store of PyTorch's launchers.

torchrun and ``accelerate launch`` host a TCPStore at MASTER_ADDR and MASTER_PORT; where these were
set by hand, rank 0 hosts it. Each rank writes there where it listens and which host it is on; then
all connect, and the store is not used any more. A later ``torch.distributed.init_process_group``
finds it unchanged.

PyTorch is imported here, and only in such a job.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringdl import _engine, _sockets
from ringdl._cores import read_cores
from ringdl._errors import StallError, UsageError
from ringdl._launch import StoreJob
from ringdl._mpi import Hosts, check_versions, count_cores
from ringdl._sockets import Endpoint
from ringdl._version import __version__

_store: Any = None
"""Kept for good: where rank 0 hosts it, others may use it later."""

_meetings = 0
"""How often this process has met others: each time under other keys."""


@dataclass(frozen=True)
class Member:
    """What a rank announces to the others.

    Attributes:
        endpoint: where it listens.
        machine: the same for ranks that can map each other's memory, as far as is known.
        cpus: logical CPUs it may run on.
        quota: CPUs' worth of time that its cgroup grants; None if not limited.
        version: of ringdl.
    """

    endpoint: Endpoint
    machine: tuple[str, ...]
    cpus: tuple[int, ...]
    quota: float | None
    version: str = __version__

    def to_json(self) -> str:
        """As text, for `from_json`."""
        end = self.endpoint
        return json.dumps(
            [
                [end.address, end.port, end.secret.hex()],
                [self.machine, self.cpus, self.quota, self.version],
            ]
        )

    @staticmethod
    def from_json(text: str | bytes) -> Member:
        """The inverse of `to_json`."""
        (address, port, secret), (machine, cpus, quota, version) = json.loads(text)
        endpoint = Endpoint(address, port, bytes.fromhex(secret))
        return Member(endpoint, tuple(machine), tuple(cpus), quota, version)


def open_engine(
    job: StoreJob, environ: Mapping[str, str], timeout: float
) -> tuple[_engine.Communicator, Hosts]:
    """Find the other ranks and connect with them. Collective.

    Args:
        job: of `ringdl._launch.detect_store_job`.
        environ: ``os.environ`` or a copy of one.
        timeout: seconds for each of finding and connecting.

    Raises:
        UsageError: no PyTorch, no MASTER_ADDR and MASTER_PORT, a rank that is there twice, or ranks
            with other versions of ringdl.
        StallError: not all ranks have arrived in time.
        Error: a rank cannot be reached.
    """
    global _meetings
    address, port = _master(job, environ)
    store = _open_store(job, timeout)
    _meetings += 1
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    listener, endpoint = _sockets.listen(_sockets.own_address(address, port))
    with listener:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        own = Member(endpoint, own_machine(), cpus, read_cores().quota)
        texts = meet(store, f"ringdl/{run}/{restart}/{_meetings}", job, own.to_json(), timeout)
        members = [Member.from_json(text) for text in texts]
        check_versions([member.version for member in members])
        endpoints = [member.endpoint for member in members]
        sockets = _sockets.connect(job.rank, endpoints, listener, timeout)
    return _engine.over_sockets(job.rank, sockets), find_hosts(job.rank, members)


def _master(job: StoreJob, environ: Mapping[str, str]) -> tuple[str, int]:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise UsageError(
            f"{job} says that there are {job.size} ranks, but not where: set MASTER_ADDR and "
            "MASTER_PORT to a port of rank 0's host, or start with torchrun, "
            f"`mpirun -n {job.size}` or `python -m ringdl run -n {job.size}`; if this process is "
            "to be alone, unset WORLD_SIZE"
        )
    return address, int(port)


def _open_store(job: StoreJob, timeout: float) -> Any:
    global _store
    if _store is not None:
        return _store
    try:
        from torch.distributed import rendezvous  # type: ignore[attr-defined]
    except ImportError as error:
        raise UsageError(
            f"{job} says that there are {job.size} ranks, which find each other through PyTorch's "
            f"store, and PyTorch cannot be used ({error}): install it, or start with "
            f"`mpirun -n {job.size}` or `python -m ringdl run -n {job.size}`, which need none"
        ) from error
    try:
        meeting = rendezvous("env://", job.rank, job.size, timeout=timedelta(seconds=timeout))
        _store = next(iter(meeting))[0]
    except (RuntimeError, ValueError) as error:
        raise StallError(
            f"rank {job.rank} has not found the store of the job at MASTER_ADDR="
            f"{os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}: {error}"
        ) from error
    return _store


def meet(store: Any, prefix: str, job: StoreJob, own: str, timeout: float) -> list[str]:
    """Send all ranks this one's text, and receive theirs. Collective.

    Rank 0 collects, so that all ranks together ask the store about three times per rank.

    Args:
        store: of PyTorch, shared by the ranks.
        prefix: of keys that nobody has used before.
        job: this rank's.
        own: its text.
        timeout: in seconds.

    Returns:
        The texts of all ranks, by rank.

    Raises:
        UsageError: another process has arrived as this rank.
        StallError: not all have arrived in time.
    """
    keys = [f"{prefix}/{rank}" for rank in range(job.size)]
    everybody = f"{prefix}/all"
    if store.add(f"{keys[job.rank]}/came", 1) > 1:
        raise UsageError(
            f"another process is rank {job.rank} of {job.size} already: if this one was started by "
            "it, as a DataLoader's workers are, it must not call ringdl.init(); else give each "
            "process a RANK of its own"
        )
    store.set(keys[job.rank], own)
    pause, deadline = 0.001, time.monotonic() + timeout
    while not store.check(keys if job.rank == 0 else [everybody]):
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise StallError(
                f"rank {job.rank} of {job.size} has not met all others in ringdl.init() within "
                f"{timeout:g} s: the ranks {missing or 'that collect'} have not arrived; look what "
                "they do, or whether WORLD_SIZE is right"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if job.rank == 0:
        texts = [store.get(key).decode() for key in keys]
        store.set(everybody, json.dumps(texts))
        return texts
    return [str(text) for text in json.loads(store.get(everybody))]


def own_machine() -> tuple[str, ...]:
    """What ranks that can map each other's memory have in common.

    They see the same processes and files of the same running kernel; a host name of its own makes
    a host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "mnt")]
    return (socket.gethostname(), boot, *spaces)


def find_hosts(rank: int, members: list[Member]) -> Hosts:
    """Group the ranks by machine; hosts are ordered by their lowest rank."""
    machines = list(dict.fromkeys(member.machine for member in members))
    numbers = [machines.index(member.machine) for member in members]
    local = [member for member in members if member.machine == members[rank].machine]
    return Hosts(
        numbers=numbers,
        local_rank=numbers[:rank].count(numbers[rank]),
        local_size=len(local),
        cores=count_cores([(member.cpus, member.quota) for member in local]),
    )
